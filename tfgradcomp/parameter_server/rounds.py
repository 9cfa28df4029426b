"""Steps of all workers, with and without a barrier."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compat import remote
from tfgradcomp.parameter_server.cluster import Cluster
from tfgradcomp.parameter_server.device_calls import DeviceCalls
from tfgradcomp.parameter_server.membership import Membership
from tfgradcomp.parameter_server.push_transport import PushLogTransport
from tfgradcomp.parameter_server.remote_worker import (
    STALENESS,
    PushingWorker,
    RemoteWorker,
)
from tfgradcomp.parameter_server.stragglers import Stragglers
from tfgradcomp.parameter_server.transport import ParameterServer


class Taken(NamedTuple):
    """The outcome of an attempt to take steps.

    Attributes:
        steps: How many all workers have committed.
        logs: The metrics' values then.
        errors: The errors of tasks, by their devices.
    """

    steps: int
    logs: dict[str, float]
    errors: dict[str, Exception]


class Rounds:
    """Lets the workers of a membership take steps, and recovers from their loss.

    A subclass says how (`take`).

    Attributes:
        transport_class: How the workers' gradients travel.
        worker_class: The class of the workers.
    """

    transport_class: ClassVar[type[ParameterServer]]
    worker_class: ClassVar[type[RemoteWorker]]

    def __init__(
        self,
        cluster: Cluster,
        membership: Membership,
        callbacks: keras.callbacks.CallbackList,
        steps_per_execution: int,
    ):
        """Begins to count the rounds of a training.

        Args:
            cluster: The tasks.
            membership: Who takes part.
            callbacks: Callbacks that are told of batches.
            steps_per_execution: Steps that workers take before the chief hears of them.
        """
        self._cluster = cluster
        self._membership = membership
        self._callbacks = callbacks
        self._rounds = membership.workers[0].rounds()
        # Between two calls no worker is in the middle of a round.
        self._batches_per_round = membership.workers[0].batches_per_round
        rounds_at_once = math.ceil(steps_per_execution / self._batches_per_round)
        self._steps_at_once = rounds_at_once * self._batches_per_round

    def run(self, done: int, end: int) -> tuple[int, dict[str, float]]:
        """Lets the workers take some steps; `done` of `end` have been taken.

        A step takes a batch of every worker; without a barrier, of one of them.

        Returns:
            How many were taken, and the logs.
        """
        membership = self._membership
        before = self._rounds
        taken = self.take(done, end)
        self._rounds += taken.steps // self._batches_per_round
        logs = taken.logs
        if taken.errors:
            membership.recover(taken.errors)
            # Those who are left may have committed some of the steps.
            self._rounds = membership.with_recovery(
                lambda: membership.workers[0].rounds()
            )
            logs = membership.with_recovery(lambda: membership.workers[0].logs())
        return (self._rounds - before) * self._batches_per_round, logs

    def take(self, done: int, end: int) -> Taken:
        """Lets the workers take some steps, and tells the callbacks.

        Args:
            done: How many of the epoch's steps have been taken.
            end: How many it has.
        """
        raise NotImplementedError


class BarrierRounds(Rounds):
    """Steps that all workers take together."""

    transport_class = ParameterServer
    worker_class = RemoteWorker

    @override
    def take(self, done, end):
        membership, serving = self._membership, self._membership.serving
        self._callbacks.on_train_batch_begin(done)
        steps = min(self._steps_at_once, end - done)
        rounds = tf.constant(steps // self._batches_per_round)
        calls = DeviceCalls(self._cluster, Stragglers(membership.workers))
        for worker in membership.workers:
            calls.start(worker.device, functools.partial(worker.run, steps))
        for device, serve in serving.items():
            calls.start(device, functools.partial(serve, rounds))
        values: list = []
        errors: dict = {}
        while calls.running:
            report = calls.next(errors)
            if report.is_error:
                errors[report.device] = report.value
            elif report.device not in serving:
                values.append(report.value)
            if errors:
                self._cluster.check_servers()
                # Replies stay open until no server can give them to some workers only.
                serves = not serving.keys().isdisjoint(calls.running)
                with remote.own_executor():
                    membership.channel.queues.close("up" if serves else "down")
        if errors:
            return Taken(0, {}, errors)
        logs = membership.workers[0].named(np.mean(values, axis=0))
        self._callbacks.on_train_batch_end(done + steps - 1, logs)
        return Taken(steps, logs, {})


class PushRounds(Rounds):
    """Pushes that each worker makes when it can.

    The loss of a worker ends the pushes of the others, who go on without it in a new
    log: in the old one what they push would wait for it.
    """

    transport_class = PushLogTransport
    worker_class = PushingWorker

    @override
    def take(self, done, end):
        membership, log = self._membership, self._membership.channel
        ranks = {w.device: rank for rank, w in enumerate(membership.workers)}
        budget = _Budget(end - done, self._steps_at_once)
        calls = DeviceCalls(self._cluster, Stragglers(membership.workers))
        for device, serve in membership.serving.items():
            calls.start(device, serve)
        for worker in membership.workers:
            calls.start(worker.device, functools.partial(_drive, worker, budget, calls))
        told = ProgressReporter(
            membership.workers[0], self._callbacks, done, self._batches_per_round
        )
        pushing, errors = {*ranks}, dict[str, Exception]()
        ends = ["servers", "workers"]
        while calls.running:
            # Workers may take long for the steps that they have begun.
            report = calls.next({} if pushing else errors)
            if report.is_error:
                errors[report.device] = report.value
                pushing.discard(report.device)
                budget.end()
                if report.device in ranks:
                    follow = functools.partial(log.discard, ranks[report.device])
                    calls.start(log.devices[0], _unless_closed(follow))
                elif ends:
                    # No worker gets an answer any more.
                    ends = []
                    self._cluster.check_servers()
                    with remote.own_executor():
                        log.queues.close("up", "down")
            elif report.has_ended or report.value is None:
                pushing.discard(report.device)
            else:
                told.tell(report)
                if self._callbacks.model.stop_training:
                    budget.end()
            if "servers" in ends and not pushing:
                ends.remove("servers")
                log.stop()
            if ends == ["workers"] and membership.serving.keys().isdisjoint(
                calls.running
            ):
                ends.remove("workers")
                calls.start(log.devices[0], _unless_closed(log.end))
        return Taken(0 if errors else told.steps, told.logs, errors)


class ProgressReporter:
    """Tells callbacks of steps that workers have taken without a barrier.

    Attributes:
        steps: How many they were told of.
        logs: The logs that they got last.
    """

    def __init__(self, worker, callbacks, done, steps_per_push):
        self.steps, self.logs = 0, {}
        self._worker, self._callbacks, self._done = worker, callbacks, done
        self._steps_per_push = steps_per_push
        self._values: dict = {}

    def tell(self, report):
        """Tells of some steps of a worker."""
        steps, self._values[report.device] = report.value
        self._callbacks.on_train_batch_begin(self._done + self.steps)
        self.steps += steps
        values = [*self._values.values()]
        pushes = (self._done + self.steps) / self._steps_per_push
        self.logs = self._worker.named(np.mean(values, axis=0))
        self.logs[STALENESS] *= len(values) / pushes
        self._callbacks.on_train_batch_end(self._done + self.steps - 1, self.logs)


class _Budget:
    """Steps that threads take from, some at a time."""

    def __init__(self, steps, at_once):
        self._steps, self._at_once = steps, at_once
        self._lock = threading.Lock()

    def take(self):
        """Returns how many steps the caller is to take."""
        with self._lock:
            steps = min(self._at_once, self._steps)
            self._steps -= steps
        return steps

    def end(self):
        """Leaves nothing to take."""
        with self._lock:
            self._steps = 0


def _drive(worker, budget, calls):
    """Lets a worker push, then follow the pushes of the others to the end."""
    while steps := budget.take():
        calls.report_progress(worker.device, (steps, worker.run(steps)))
    calls.report_progress(worker.device, None)
    worker.drain()


def _unless_closed(call):
    """Returns a call that ends with the log, however that ends."""

    def called():
        with contextlib.suppress(tf.errors.OpError):
            call()

    return called
