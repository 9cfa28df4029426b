"""The rounds in which all workers and the parameter servers meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgradcomp.parameter_server.queues import QueueKey, Queues, ServerEndpoint
from tfgradcomp.parameter_server.server_state import ServerStates


class WorkerEndpoint:
    """A worker's place where workers meet.

    Attributes:
        channel: A `RoundChannel` or a `PushLog`.
        peer: The worker's rank there, which names its queues.
    """

    _rank: Any

    @property
    def rank(self) -> Any:
        """The same; in what is traced for all workers an int32 scalar."""
        return self._rank

    def join(self, channel: Any, peer: int) -> None:
        """Moves to another channel; what was traced stays with the old one."""
        self.channel, self.peer, self._rank = channel, peer, peer

    @contextlib.contextmanager
    def traced_with(self, rank: tf.Tensor) -> Iterator[None]:
        """Traces steps that take the rank from an argument."""
        self._rank = rank
        try:
            yield
        finally:
            self._rank = self.peer


class RoundChannel:
    """The queues by which N workers and the servers meet, until one of them is lost.

    Attributes:
        num_workers: N.
        devices: Names of the servers' devices.
        queues: The queues.
        states: The servers' states.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        num_workers: int,
        states: dict[str, list[np.ndarray]],
    ):
        """Creates a channel.

        Args:
            name: Distinguishes the queues from those of other channels.
            devices: Names of the servers' devices.
            num_workers: N.
            states: What `ServerStates.whole` of an earlier one returned, or nothing.
        """
        self.num_workers = num_workers
        self.devices = tuple(devices)
        self.queues = Queues(name, devices)
        self.states = ServerStates(devices, num_workers, states)
        self._endpoints: dict = {}

    def send(
        self,
        name: str,
        endpoint: ServerEndpoint,
        peer: int,
        messages: Sequence[tf.Tensor],
    ) -> None:
        """Sends a worker's messages to the servers.

        Args:
            name: Name of the endpoint, the same on all workers.
            endpoint: How servers answer there; the first worker's counts.
            peer: The rank of the worker that sends.
            messages: int32 vectors, one for each server that answers.
        """
        self._endpoints.setdefault(name, endpoint)
        for server, message in enumerate(messages):
            self.queues.enqueue(QueueKey("up", name, server, peer), message)

    def receive(self, name: str, rank: int) -> list[tf.Tensor]:
        """Returns the servers' replies to all workers' messages, once all are there.

        Args:
            name: Name of the endpoint.
            rank: The rank of the worker that receives.
        """
        return [
            self.queues.dequeue(QueueKey("down", name, server, rank), words)
            for server, words in enumerate(self._endpoints[name].reply_words)
        ]

    def serve(self, server: int) -> Callable:
        """Returns the half of a server: a function of a number of rounds.

        Every worker's step must have been traced before.
        """

        @tf.function(autograph=False)
        def serve(rounds):
            with tf.device(self.devices[server]):
                return tf.while_loop(
                    lambda index: index < rounds,
                    lambda index: (self._serve_round(server, index),),
                    [tf.constant(0)],
                    parallel_iterations=1,
                )[0]

        return serve.get_concrete_function(tf.TensorSpec([], tf.int32))

    def _serve_round(self, server, index):
        ranks = range(self.num_workers)
        for name, endpoint in self._endpoints.items():
            if server >= len(endpoint.words):
                continue
            rows = [
                self.queues.dequeue(
                    QueueKey("up", name, server, rank), endpoint.words[server]
                )
                for rank in ranks
            ]
            reply = endpoint.answer(server, _stacked(rows))
            for rank in ranks:
                self.queues.enqueue(QueueKey("down", name, server, rank), reply)
        return index + 1

    def close(self, direction: str) -> None:
        """Closes the queues for messages, `"up"`, or for replies, `"down"`."""
        self.queues.close(direction)

    def free(self) -> None:
        """Destroys the queues and all that is in them."""
        self.queues.free()


def _stacked(rows):
    """Joins messages; zeros follow those that are shorter than others."""
    if all(row.shape.is_fully_defined() for row in rows):
        return tf.stack(rows)
    longest = tf.reduce_max([tf.size(row) for row in rows])
    return tf.stack([tf.pad(row, [[0, longest - tf.size(row)]]) for row in rows])
