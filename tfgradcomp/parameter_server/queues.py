"""Queues on parameter servers, through which workers and servers exchange messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf


class ServerEndpoint(NamedTuple):
    """The servers' rule at a call site: how each server answers messages.

    Attributes:
        words: int32 words of a worker's message to each server that answers; None if
            they vary.
        reply_words: Words of each server's reply; None if they vary.
        answer: Function of a server's index and the messages, int32 `[N, words]`, that
            returns the reply, int32 `[reply_words]`. Shorter messages end with zeros.
        is_reply_known: Whether a worker can compute the reply to its message itself.
    """

    words: tuple[int | None, ...]
    reply_words: tuple[int | None, ...]
    answer: Callable[[int, tf.Tensor], tf.Tensor]
    is_reply_known: bool = False


def total(*words: int | None) -> int | None:
    """Returns a sum of words; None if any of them varies."""
    known = [count for count in words if count is not None]
    return sum(known) if len(known) == len(words) else None


class QueueKey(NamedTuple):
    """The name of a queue.

    Attributes:
        direction: `"up"` for messages to the servers, `"down"` for their replies.
        call_site: Name of the call site.
        server: Index of the server that has the queue.
        peer: The rank of the worker that uses the queue; None: all workers.
        pusher: The rank of the only worker whose pushes the queue is for, if any.
    """

    direction: str
    call_site: str
    server: int
    peer: int | None
    pusher: int | None = None


class Queues:
    """Queues of int32 vectors on the servers, created at their first use.

    Args:
        name: Distinguishes these queues from all others on the servers.
        devices: Names of the servers' devices.
        capacities: Largest number of messages in a queue, by call site; queues of other
            call sites are unbounded.
    """

    def __init__(self, name: str, devices: Sequence[str], capacities: Mapping):
        self._name, self._devices = name, tuple(devices)
        self._capacities = capacities
        self._queues: dict[QueueKey, tf.Tensor] = {}
        self._closed: set[str] = set()

    def enqueue(self, key: QueueKey, message: tf.Tensor) -> tf.Operation:
        """Puts a message into a queue; waits while the queue is full."""
        queue = self._queue(key)
        with tf.device(self._devices[key.server]):
            return tf.raw_ops.QueueEnqueueV2(handle=queue, components=[message])

    def dequeue(self, key: QueueKey, words: int | None = None) -> tf.Tensor:
        """Takes the next message of `words` words out of a queue, or waits for it."""
        queue = self._queue(key)
        with tf.device(self._devices[key.server]):
            (message,) = tf.raw_ops.QueueDequeueV2(
                handle=queue, component_types=[tf.int32]
            )
        return tf.ensure_shape(message, [words])

    def in_place_of(self, peer: int, other: int) -> dict[int, tf.Tensor]:
        """Returns the queues of worker `other` by the `id`s of those of worker `peer`.

        Queues that do not belong to `peer` stand for themselves.
        """
        return {
            id(queue): self._queue(
                key._replace(peer=other) if key.peer == peer else key
            )
            for key, queue in [*self._queues.items()]
        }

    def close(self, *directions: str) -> None:
        """Closes the queues of directions, `"up"` or `"down"`.

        Operations that wait for a message or for room in a queue end with an error.
        """
        new = {*directions} - self._closed
        self._closed |= new
        for key, queue in self._queues.items():
            # The queues of a lost server are gone already.
            with tf.device(self._devices[key.server]), unless_gone():
                if key.direction in new:
                    tf.raw_ops.QueueCloseV2(handle=queue, cancel_pending_enqueues=True)

    def free(self) -> None:
        """Destroys the queues and their messages."""
        for key, queue in self._queues.items():
            with tf.device(self._devices[key.server]), unless_gone():
                tf.raw_ops.DestroyResourceOp(resource=queue)
        self._queues = {}

    def _queue(self, key):
        if key not in self._queues:
            with tf.init_scope(), tf.device(self._devices[key.server]):
                self._queues[key] = tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int32],
                    capacity=self._capacities.get(key.call_site, -1),
                    shared_name="/".join(map(str, (self._name, *key))),
                )
        return self._queues[key]


@contextlib.contextmanager
def unless_gone():
    """Ignores the errors of operations on a lost server."""
    with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
        yield
