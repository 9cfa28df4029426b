"""Steps of all workers, with and without a barrier."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compat import remote
from tfgradcomp.parameter_server.cluster import Cluster
from tfgradcomp.parameter_server.device_calls import DeviceCalls, Report
from tfgradcomp.parameter_server.membership import Membership
from tfgradcomp.parameter_server.push_stepper import PushLogTransport
from tfgradcomp.parameter_server.remote_worker import (
    STALENESS,
    PushingWorker,
    RemoteWorker,
)
from tfgradcomp.parameter_server.stragglers import Stragglers
from tfgradcomp.parameter_server.transport import ParameterServer


class Outcome(NamedTuple):
    """The steps that all workers have committed, logs after them, errors by device."""

    steps: int
    logs: dict[str, float]
    errors: dict[str, Exception]


class Rounds:
    """Lets the workers of a membership take steps, and recovers from lost workers."""

    transport_class: ClassVar[type[ParameterServer]]
    worker_class: ClassVar[type[RemoteWorker]]

    def __init__(
        self,
        cluster: Cluster,
        membership: Membership,
        callbacks: keras.callbacks.CallbackList,
        steps_per_execution: int,
    ):
        self._cluster = cluster
        self._membership = membership
        self._callbacks = callbacks
        self._rounds = membership.workers[0].rounds()
        # Reports come between rounds, never within a round.
        self._batches_per_round = membership.workers[0].batches_per_round
        rounds_at_once = math.ceil(steps_per_execution / self._batches_per_round)
        self._steps_at_once = rounds_at_once * self._batches_per_round

    def run(self, done: int, end: int) -> tuple[int, dict[str, float]]:
        """Takes some of the steps from `done` to `end`; returns their number, and logs.

        A step takes a batch of every worker, or of a single worker without a barrier.
        """
        membership, before = self._membership, self._rounds
        steps, logs, errors = self.take(done, end)
        self._rounds += steps // self._batches_per_round
        if errors:
            membership.recover(errors)
            # The remaining workers may have committed some of the steps.
            self._rounds = membership.with_recovery(
                lambda: membership.workers[0].rounds()
            )
            logs = membership.with_recovery(lambda: membership.workers[0].logs())
        return (self._rounds - before) * self._batches_per_round, logs

    def take(self, done: int, end: int) -> Outcome:
        """Lets the workers take some of the steps, and informs the callbacks."""
        raise NotImplementedError

    def _start_calls(self) -> DeviceCalls:
        return DeviceCalls(self._cluster, Stragglers(self._membership.workers))


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
        calls = self._start_calls()
        for worker in membership.workers:
            calls.start(worker.device, worker.run, steps)
        for device, serve in serving.items():
            calls.start(device, serve, rounds)
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
                # Replies stay open while a server runs: all workers or none get them.
                serves = not serving.keys().isdisjoint(calls.running)
                with remote.own_executor():
                    membership.channel.queues.close("up" if serves else "down")
        if errors:
            return Outcome(0, {}, errors)
        logs = membership.workers[0].named(np.mean(values, axis=0))
        self._callbacks.on_train_batch_end(done + steps - 1, logs)
        return Outcome(steps, logs, {})


class PushRounds(Rounds):
    """Pushes that each worker makes without waiting for the others.

    After the loss of a worker the other workers continue in a new log, because their
    pushes to the old log would wait for the lost worker.
    """

    transport_class = PushLogTransport
    worker_class = PushingWorker

    @override
    def take(self, done, end):
        membership, log = self._membership, self._membership.channel
        ranks = {w.device: rank for rank, w in enumerate(membership.workers)}
        budget = _Budget(end - done, self._steps_at_once)
        calls = self._start_calls()
        for device, serve in membership.serving.items():
            calls.start(device, serve)
        for worker in membership.workers:
            calls.start(worker.device, _drive, worker, budget, calls)
        reporter = ProgressReporter(
            membership.workers[0], self._callbacks, done, self._batches_per_round
        )
        pushing, errors = {*ranks}, dict[str, Exception]()
        to_end = ["servers", "workers"]
        while calls.running:
            # While workers push, the wait is not limited: their steps may take long.
            report = calls.next({} if pushing else errors)
            if report.is_error:
                errors[report.device] = report.value
                pushing.discard(report.device)
                budget.end()
                if report.device in ranks:
                    rank = ranks[report.device]
                    calls.start(log.devices[0], _until_closed, log.discard, rank)
                elif to_end:
                    # Without this server no worker receives replies.
                    to_end = []
                    self._cluster.check_servers()
                    with remote.own_executor():
                        log.queues.close("up", "down")
            elif report.has_ended or report.value is None:
                pushing.discard(report.device)
            else:
                reporter.report(report)
                if self._callbacks.model.stop_training:
                    budget.end()
            if "servers" in to_end and not pushing:
                to_end.remove("servers")
                log.stop()
            serves = not membership.serving.keys().isdisjoint(calls.running)
            if to_end == ["workers"] and not serves:
                to_end.remove("workers")
                calls.start(log.devices[0], _until_closed, log.end)
        return Outcome(0 if errors else reporter.steps, reporter.logs, errors)


class ProgressReporter:
    """Informs callbacks of steps without a barrier; has their number and last logs."""

    def __init__(self, worker, callbacks, done, steps_per_push):
        self.steps, self.logs = 0, {}
        self._worker, self._callbacks, self._done = worker, callbacks, done
        self._steps_per_push = steps_per_push
        self._values: dict = {}

    def report(self, report: Report) -> None:
        """Informs the callbacks of some steps of a worker."""
        steps, self._values[report.device] = report.value
        self._callbacks.on_train_batch_begin(self._done + self.steps)
        self.steps += steps
        values = [*self._values.values()]
        pushes = (self._done + self.steps) / self._steps_per_push
        self.logs = self._worker.named(np.mean(values, axis=0))
        self.logs[STALENESS] *= len(values) / pushes
        self._callbacks.on_train_batch_end(self._done + self.steps - 1, self.logs)


class _Budget:
    """A number of steps from which threads take some at a time."""

    def __init__(self, steps, at_once):
        self._steps, self._at_once = steps, at_once
        self._lock = threading.Lock()

    def take(self):
        """Returns the number of steps for the caller."""
        with self._lock:
            steps = min(self._at_once, self._steps)
            self._steps -= steps
        return steps

    def end(self):
        """Removes the remaining steps."""
        with self._lock:
            self._steps = 0


def _drive(worker, budget, calls):
    """Lets a worker push, then apply the pushes of the others to the end."""
    while steps := budget.take():
        calls.report_progress(worker.device, (steps, worker.run(steps)))
    calls.report_progress(worker.device, None)
    worker.drain()


def _until_closed(call, *arguments):
    """Calls a function of a log, and ignores errors after the log has been closed."""
    with contextlib.suppress(tf.errors.OpError):
        call(*arguments)
