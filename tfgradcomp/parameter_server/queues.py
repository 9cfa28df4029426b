"""Queues on parameter servers, by which workers and servers hand over messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import tensorflow as tf


class ServerEndpoint(NamedTuple):
    """The servers' half of a call site: how each server answers a message.

    Attributes:
        words: int32 words of a worker's message to each server that answers; None
            where they vary.
        reply_words: Words of each server's reply; None where they vary.
        answer: Function of a server's index and the messages, int32 `[N, words]`,
            that returns the reply, int32 `[reply_words]`. Shorter messages have zeros
            at the end.
        is_reply_known: Whether a worker knows the reply to its message by itself.
    """

    words: tuple[int | None, ...]
    reply_words: tuple[int | None, ...]
    answer: Callable[[int, tf.Tensor], tf.Tensor]
    is_reply_known: bool = False


def total(*words: int | None) -> int | None:
    """Returns a sum of words; None where one of them varies."""
    known = [count for count in words if count is not None]
    return sum(known) if len(known) == len(words) else None


class QueueKey(NamedTuple):
    """The name of a queue.

    Attributes:
        direction: `"up"` for messages to the servers, `"down"` for their replies.
        call_site: Name of the call site.
        server: Index of the server that the queue is on.
        peer: The rank of the worker that uses it; None: all do.
        pusher: The rank of the one whose push it is about, if it is about one's.
    """

    direction: str
    call_site: str
    server: int
    peer: int | None
    pusher: int | None = None


class Queues:
    """Queues of int32 vectors on the servers, created at their first use.

    Attributes:
        name: Distinguishes these queues from all others on the servers.
        devices: Names of the servers' devices.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        capacities: Mapping[str, int] = MappingProxyType({}),
    ):
        """Creates no queue yet.

        Args:
            name: Distinguishes these queues from all others on the servers.
            devices: Names of the servers' devices.
            capacities: Most messages in a queue, by call sites; others have no bound.
        """
        self.name = name
        self.devices = tuple(devices)
        self._capacities = capacities
        self._queues: dict = {}
        self._closed: set = set()

    def enqueue(self, key: QueueKey, message: tf.Tensor) -> tf.Operation:
        """Puts a message into a queue, and waits where that has no room."""
        queue = self._queue(key)
        with tf.device(self.devices[key.server]):
            return tf.raw_ops.QueueEnqueueV2(handle=queue, components=[message])

    def dequeue(self, key: QueueKey, words: int | None = None) -> tf.Tensor:
        """Takes the next message out of a queue, and waits for it where there is none.

        Args:
            key: The queue.
            words: Words of the message, where that is known.
        """
        queue = self._queue(key)
        with tf.device(self.devices[key.server]):
            (message,) = tf.raw_ops.QueueDequeueV2(
                handle=queue, component_types=[tf.int32]
            )
        return tf.ensure_shape(message, [words])

    def in_place_of(self, peer: int, other: int) -> dict[int, tf.Tensor]:
        """Returns the queues of a worker by the `id`s of another's.

        Args:
            peer: The rank of the one whose queues there are.
            other: The rank of the one whose queues take their places.
        """
        return {
            id(queue): self._queue(
                key._replace(peer=other) if key.peer == peer else key
            )
            for key, queue in [*self._queues.items()]
        }

    def close(self, direction: str) -> None:
        """Closes the queues of a direction, `"up"` or `"down"`.

        Whoever waits for a message of a closed queue that is empty, or for room in one,
        gets an error.
        """
        if direction in self._closed:
            return
        self._closed.add(direction)
        for key, queue in self._queues.items():
            # A server that is gone has closed them in its way.
            with tf.device(self.devices[key.server]), unless_gone():
                if key.direction == direction:
                    tf.raw_ops.QueueCloseV2(handle=queue, cancel_pending_enqueues=True)

    def free(self) -> None:
        """Destroys the queues and all that is in them."""
        for key, queue in self._queues.items():
            with tf.device(self.devices[key.server]), unless_gone():
                tf.raw_ops.DestroyResourceOp(resource=queue)
        self._queues = {}

    def _queue(self, key):
        if key not in self._queues:
            with tf.init_scope(), tf.device(self.devices[key.server]):
                self._queues[key] = tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int32],
                    capacity=self._capacities.get(key.call_site, -1),
                    shared_name="/".join(map(str, (self.name, *key))),
                )
        return self._queues[key]


@contextlib.contextmanager
def unless_gone():
    """Ignores the errors of operations on a server that is gone."""
    with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
        yield
