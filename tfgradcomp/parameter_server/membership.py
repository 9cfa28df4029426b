"""The workers of a training: loss, waiting and readmission of workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgradcomp.compat import remote
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.cluster import TASK_LOST, Cluster, met_closed_queue
from tfgradcomp.parameter_server.model_factory import ModelFactory
from tfgradcomp.parameter_server.remote_worker import RemoteWorker, shared_values
from tfgradcomp.parameter_server.transport import ParameterServer

_ATTEMPTS = 5


class Membership:
    """The workers that take part in a training, and their channel.

    With `waits_for_lost`, training waits for the restart of a lost worker.

    Attributes:
        workers: The workers, by rank.
        channel: The workers' `RoundChannel` or `PushLog`.
        serving: The functions that the servers run, by device.
    """

    def __init__(
        self,
        cluster: Cluster,
        models: ModelFactory,
        transport_class: type[ParameterServer],
        worker_class: type[RemoteWorker],
        waits_for_lost: bool,
        **channel_arguments,
    ):
        self._cluster = cluster
        self._models = models
        self._transport_class = transport_class
        self._worker_class = worker_class
        self._waits_for_lost = waits_for_lost
        self._channel_arguments = channel_arguments
        self._absent: set[str] = set()
        # Kept, because freeing the variables of a stopped task would wait for the task.
        self._lost: list[Any] = []
        self._dataset_fn: Any = None
        self.workers: list[Any] = []
        self.channel: Any = None
        self.serving: dict = {}

    def begin(self, dataset_fn: Callable) -> None:
        """Connects all present workers to a new channel, with new datasets.

        An epoch's begin readmits workers that were lost and are back.
        """
        self._dataset_fn = dataset_fn
        for worker in self.workers:
            worker.close()
        try:
            self._assemble(self._devices(), self.workers)
        except TASK_LOST as error:
            self.recover(dict.fromkeys(self._present(), error))

    def with_recovery(self, action: Callable):
        """Returns an action's result; repeats the action after a loss of workers."""
        while True:
            try:
                return action()
            except TASK_LOST as error:
                self.recover(dict.fromkeys(self._present(), error))

    def recover(self, errors: dict[str, Exception]) -> None:
        """Continues without lost workers, including those lost during recovery.

        `errors` are those of an action, by device. If no worker is lost, raises the
        error that caused the others.
        """
        lost = set()
        for _ in range(_ATTEMPTS):
            remote.forget_errors()
            lost |= self._cluster.lost(errors)
            if not lost:
                break
            try:
                return self.resume_without(lost)
            except TASK_LOST as error:
                errors = dict.fromkeys(self._present(), error)
        raise _cause(errors)

    def resume_without(self, lost: set[str]) -> None:
        """Continues without the tasks of lost devices, or waits for them.

        Raises a ConnectionError if a parameter server is lost, and a RuntimeError if
        all workers are lost.
        """
        self._cluster.check_servers(lost)
        devices = self._devices()
        left = [device for device in devices if device not in lost]
        if not left:
            raise RuntimeError(
                "All workers are gone. Restart all tasks and resume from the last "
                f"checkpoint. Received: lost={sorted(lost)}"
            )
        survivors = [w for w in self.workers if w.device not in lost]
        rounds = {worker.rounds() for worker in survivors}
        if len(rounds) > 1:
            raise RuntimeError(
                "The remaining workers took different numbers of steps. Restart all "
                f"tasks and resume from the last checkpoint. Received: steps={rounds}"
            )
        self._lost += [w for w in self.workers if w.device in lost]
        names = ", ".join(sorted(lost))
        if self._waits_for_lost:
            logger.warning("lost %s; waiting for their restart", names)
            self._cluster.wait_for_all()
            self._reassemble(devices, survivors)
            return
        logger.warning("lost %s; continuing with %d worker(s)", names, len(left))
        self._assemble(left, survivors)
        self._absent |= lost

    def readmit(self) -> None:
        """Readmits workers that were lost and are back."""
        if self._absent and self._cluster.all_answer():
            logger.info("back: %s", ", ".join(sorted(self._absent)))
            self._absent = set()
            self._reassemble(self._cluster.workers, self.workers)

    def _reassemble(self, devices, workers):
        remote.reconnect()
        self._assemble(devices, workers)
        self._lost = []

    def _devices(self):
        """Returns the devices of the workers that take part, or will at the start."""
        return [w.device for w in self.workers] or self._cluster.workers

    def _present(self):
        return [d for d in self._cluster.devices if d not in self._absent]

    def _assemble(self, devices, old):
        """Connects the workers of devices, including the workers `old`, to a channel.

        After an error, the membership is unchanged, and the call can be repeated.
        """
        states, shared = {}, None
        for worker in old:
            worker.drop_window()
        if old:
            states = self.channel.states.whole(
                old[0].committed_steps(), old[0].kept_states()
            )
            shared = shared_values(old[0].model)
        servers = [f"{device}/device:CPU:0" for device in self._cluster.servers]
        name = f"tfgradcomp/{uuid.uuid4().hex}"
        channel = self._transport_class.channel_class(
            name, servers, len(devices), states, **self._channel_arguments
        )
        try:
            workers = self._connected(channel, devices, old, shared)
            serving = {
                device: channel.serve(index)
                for index, device in enumerate(self._cluster.servers)
            }
        except BaseException:
            channel.queues.free()
            raise
        if self.channel:
            self.channel.queues.free()
        self.channel, self.workers, self.serving = channel, workers, serving

    def _connected(self, channel, devices, old, shared):
        """Returns the workers of devices on a channel, each with a rank."""
        by_device = {worker.device: worker for worker in old}
        workers: list = []
        for rank, device in enumerate(devices):
            worker = by_device.get(device) or self._models.make_worker(
                self._worker_class, device, self._transport_class.at(channel, rank)
            )
            worker.open(self._dataset_fn, len(devices), rank)
            worker.join(channel, rank, *workers[:1])
            if shared and device not in by_device:
                worker.take(shared)
            workers.append(worker)
        return workers


def _cause(errors):
    """Returns the error that caused the others, which result from closed queues."""
    first = [error for error in errors.values() if not met_closed_queue(error)]
    cause = (first or [*errors.values()])[0]
    if isinstance(cause, tf.errors.OutOfRangeError) and "End of seq" in str(cause):
        return ValueError(
            "A worker's dataset has ended. Append .repeat(); steps_per_epoch ends an "
            f"epoch. Received: {str(cause).splitlines()[0]}"
        )
    return cause
