"""The workers of a training: losing them, waiting for them, readmitting them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgradcomp.compat import remote
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.cluster import TASK_LOST, Cluster, met_closed_queue
from tfgradcomp.parameter_server.model_factory import ModelFactory
from tfgradcomp.parameter_server.remote_worker import (
    RemoteWorker,
    shared_variables,
    values_of,
)
from tfgradcomp.parameter_server.transport import ParameterServer

_ATTEMPTS = 5


class Membership:
    """The workers that take part, and the channel at which they meet.

    Attributes:
        workers: The workers, by ranks.
        channel: The `RoundChannel` or `PushLog` at which they meet.
        serving: The servers' half of it, by their devices.
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
        """Creates a membership of nobody.

        Args:
            cluster: The tasks.
            models: What makes the workers' models.
            transport_class: How the workers' gradients travel.
            worker_class: The class of the workers.
            waits_for_lost: Whether training waits until a lost worker has been started
                again; else it continues without.
            **channel_arguments: More arguments of what they meet at.
        """
        self._cluster = cluster
        self._models = models
        self._transport_class = transport_class
        self._worker_class = worker_class
        self._waits_for_lost = waits_for_lost
        self._channel_arguments = channel_arguments
        self._absent: set[str] = set()
        # Freeing what a stopped task holds would wait for it.
        self._lost: list[Any] = []
        self._dataset_fn: Any = None
        # Of `worker_class`.
        self.workers: list[Any] = []
        self.channel: Any = None
        self.serving: dict = {}

    def begin(self, dataset_fn: Callable) -> None:
        """Makes all workers that are there meet, with new datasets."""
        self._dataset_fn = dataset_fn
        for worker in self.workers:
            worker.close()
        # Workers that were lost, and are back, are readmitted when an epoch begins.
        try:
            self._assemble(self._devices(), self.workers)
        except TASK_LOST as error:
            self.recover(dict.fromkeys(self._present(), error))

    def with_recovery(self, action: Callable):
        """Returns what an action returns, repeated without workers that are lost."""
        while True:
            try:
                return action()
            except TASK_LOST as error:
                self.recover(dict.fromkeys(self._present(), error))

    def recover(self, errors: dict[str, Exception]) -> None:
        """Continues without lost workers, including those lost during recovery.

        Args:
            errors: The errors of a training step or another action, by devices.

        Raises:
            Exception: The error that the others follow from, if no worker is lost.
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
        """Continues without the tasks of these devices, or waits for them.

        Raises:
            ConnectionError: If a parameter server is gone.
            RuntimeError: If all workers are gone.
        """
        self._cluster.check_servers(lost)
        devices = self._devices()
        left = [device for device in devices if device not in lost]
        if not left:
            raise RuntimeError(
                "All workers are gone. Start all tasks again and resume from the last "
                f"checkpoint. Received: {sorted(lost)}"
            )
        survivors = [w for w in self.workers if w.device not in lost]
        rounds = {worker.rounds() for worker in survivors}
        if len(rounds) > 1:
            raise RuntimeError(f"The workers took different numbers of steps: {rounds}")
        self._lost += [w for w in self.workers if w.device in lost]
        names = ", ".join(sorted(lost))
        if self._waits_for_lost:
            logger.warning("lost %s; waiting until started again", names)
            self._cluster.wait_for_all()
            remote.reconnect()
            self._assemble(devices, survivors)
            self._lost = []
            return
        logger.warning("lost %s; going on with %d worker(s)", names, len(left))
        self._assemble(left, survivors)
        self._absent |= lost

    def readmit(self) -> None:
        """Takes in workers that were lost and are back."""
        if self._absent and self._cluster.all_answer():
            logger.info("back: %s", ", ".join(sorted(self._absent)))
            self._absent = set()
            remote.reconnect()
            self._assemble(self._cluster.workers, self.workers)
            self._lost = []

    def _devices(self):
        """Returns the devices of the workers that take part, or are to begin."""
        return [w.device for w in self.workers] or self._cluster.workers

    def _present(self):
        return [d for d in self._cluster.devices if d not in self._absent]

    def _assemble(self, devices, old):
        """Makes the workers of these devices meet, of which `old` are there already.

        Where that fails all is as before, and can be tried again.
        """
        states, shared = {}, None
        for worker in old:
            worker.drop_window()
        if old:
            states = self.channel.states.whole(
                old[0].committed_steps(), old[0].kept_states()
            )
            shared = values_of(shared_variables(old[0].model))
        servers = [f"{device}/device:CPU:0" for device in self._cluster.servers]
        name = f"tfgradcomp/{uuid.uuid4().hex}"
        channel = self._transport_class.channel_class(
            name, servers, len(devices), states, **self._channel_arguments
        )
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
        serving = {
            device: channel.serve(index)
            for index, device in enumerate(self._cluster.servers)
        }
        if self.channel:
            self.channel.queues.free()
        self.channel, self.workers, self.serving = channel, workers, serving


def _cause(errors):
    """Returns the error that the others follow from: those met closed queues."""
    first = [error for error in errors.values() if not met_closed_queue(error)]
    cause = (first or [*errors.values()])[0]
    if isinstance(cause, tf.errors.OutOfRangeError) and "End of seq" in str(cause):
        return ValueError(
            "A worker's dataset has ended. Append .repeat(); steps_per_epoch says "
            "when an epoch ends."
        )
    return cause
