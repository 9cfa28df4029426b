"""The parts that `RoundChannel` and `PushLog` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.parameter_server.queues import Queues, ServerEndpoint
from tfgradcomp.parameter_server.server_state import ServerStates


class Channel:
    """The queues by which N workers and the servers exchange messages.

    Args:
        name: Distinguishes the queues from those of other channels.
        devices: Names of the servers' devices.
        num_workers: N.
        states: `ServerStates.whole` of an earlier channel, or an empty dictionary.
        capacities: As in `Queues`.

    Attributes:
        queues: The queues.
        states: The servers' states.
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


class WorkerEndpoint:
    """A worker's end of a channel.

    Attributes:
        channel: A `RoundChannel` or a `PushLog`.
        peer: The worker's rank, which names its queues.
    """

    _rank: Any

    def __init__(self, channel: Any, peer: int):
        self.join(channel, peer)

    @property
    def rank(self) -> Any:
        """The worker's rank; an int32 scalar in functions traced for all workers."""
        return self._rank

    def join(self, channel: Any, peer: int) -> None:
        """Moves to another channel; functions traced before stay with the old one."""
        self.channel, self.peer, self._rank = channel, peer, peer

    def words_sent(self, call: CollectiveCall) -> float:
        """Returns the words that a worker sends for a call: each goes to one server."""
        return call.words

    @contextlib.contextmanager
    def traced_with(self, rank: tf.Tensor) -> Iterator[None]:
        """Traces steps that take the rank from an argument."""
        self._rank = rank
        try:
            yield
        finally:
            self._rank = self.peer
