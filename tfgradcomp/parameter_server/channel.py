"""Channels between workers and parameter servers; those of rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.parameter_server.queues import QueueKey, Queues, ServerEndpoint
from tfgradcomp.parameter_server.server_state import ServerStates


class Channel:
    """The queues by which N workers and the servers exchange messages.

    Args:
        name: Distinguishes the queues from those of other channels.
        devices: Names of the servers' devices.
        num_workers: N.
        states: `ServerStates.whole` of an earlier channel, or an empty dictionary.
        capacities: As in `Queues`.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        num_workers: int,
        states: dict[str, list[np.ndarray]],
        capacities: Mapping[str, int] = MappingProxyType({}),
    ):
        self.num_workers = num_workers
        self.devices = tuple(devices)
        self.queues = Queues(name, devices, capacities)
        self.states = ServerStates(devices, num_workers, states)
        self._endpoints: dict[str, ServerEndpoint] = {}

    def serve(self, server: int) -> Callable:
        """Returns the function by which a server answers the workers' messages.

        Every worker's step must have been traced before.
        """
        raise NotImplementedError


class RoundChannel(Channel):
    """A channel in which servers wait for a message from every worker."""

    def send(
        self,
        name: str,
        endpoint: ServerEndpoint,
        peer: int,
        messages: Sequence[tf.Tensor],
    ) -> None:
        """Sends int32 vectors of the worker `peer` to the servers, in their order.

        The first call for a name, which is the same on all workers, sets the endpoint.
        """
        self._endpoints.setdefault(name, endpoint)
        for server, message in enumerate(messages):
            self.queues.enqueue(QueueKey("up", name, server, peer), message)

    def receive(self, name: str, peer: int) -> list[tf.Tensor]:
        """Waits, for the worker `peer`, for the servers' replies at an endpoint."""
        return [
            self.queues.dequeue(QueueKey("down", name, server, peer), words)
            for server, words in enumerate(self._endpoints[name].reply_words)
        ]

    @override
    def serve(self, server):
        """Returns the function of a number of rounds by which a server answers."""

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
        peers = range(self.num_workers)
        for name, endpoint in self._endpoints.items():
            if server >= len(endpoint.words):
                continue
            words = endpoint.words[server]
            rows = [
                self.queues.dequeue(QueueKey("up", name, server, peer), words)
                for peer in peers
            ]
            reply = endpoint.answer(server, _stacked(rows))
            for peer in peers:
                self.queues.enqueue(QueueKey("down", name, server, peer), reply)
        return index + 1


class WorkerEndpoint:
    """A worker's end of a channel; the rank `peer` names the worker's queues."""

    _rank: Any

    def __init__(self, channel: Any, peer: int):
        self.join(channel, peer)

    @property
    def rank(self) -> Any:
        """The worker's rank; an int32 scalar in functions traced for all workers."""
        return self._rank

    def join(self, channel: Any, peer: int) -> None:
        """Moves to a channel; functions that were traced before stay with the last."""
        self.channel, self.peer, self._rank = channel, peer, peer

    def words_sent(self, call: CollectiveCall) -> float:
        """Returns the words that a worker sends for a call, each to a single server."""
        return call.words

    @contextlib.contextmanager
    def traced_with(self, rank: tf.Tensor) -> Iterator[None]:
        """Traces steps that take the rank from an argument."""
        self._rank = rank
        try:
            yield
        finally:
            self._rank = self.peer


def _stacked(rows):
    """Stacks messages; shorter messages are padded with zeros."""
    if all(row.shape.is_fully_defined() for row in rows):
        return tf.stack(rows)
    longest = tf.reduce_max([tf.size(row) for row in rows])
    return tf.stack([tf.pad(row, [[0, longest - tf.size(row)]]) for row in rows])
