"""Parameter servers without a barrier: a log of pushes that every worker follows.

A worker pushes when it has a gradient. The servers answer each push by itself, as if
there were one worker, and put the answer where every worker finds it, for each pusher
in the order of its pushes. The first server also writes down the order of all pushes.
Every worker applies all answers in that order, its own among them: weights are a
function of how much of the log was applied, and nothing is lost or applied twice.

The order that a worker has not yet followed is bounded, and so are the answers that
wait for it: while one of the workers has no room for a push, its pusher waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.core.arguments import check_integer
from tfgradcomp.parameter_server.queues import (
    QueueKey,
    Queues,
    ServerEndpoint,
    unless_gone,
)
from tfgradcomp.parameter_server.server_state import ServerStates

_ORDER = "order"
# All workers push into one queue on a server. A message begins with the index of its
# endpoint, in the order in which they were declared, and the pusher's rank.
_PUSHES = "pushes"
_INDEX_OF_ORDER = 0
# Pushes that a worker may lag behind, by the number of workers.
_STALENESS_PER_WORKER = 8


def bound_of_staleness(max_staleness: int | None, num_workers: int) -> int:
    """Returns how many pushes of others may come before a worker's own.

    Args:
        max_staleness: What was asked for; None: eight times the number of workers.
        num_workers: N.

    Raises:
        ValueError: If it is less than N: each of the others may be pushing at any time.
    """
    if max_staleness is None:
        return _STALENESS_PER_WORKER * num_workers
    check_integer("max_staleness", max_staleness, num_workers)
    return max_staleness


class PushLog:
    """The queues by which N workers push and pull.

    An entry of the order is a worker's rank, or N, which ends it.

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
        max_staleness: int | None = None,
    ):
        """Creates a log.

        Args:
            name: Distinguishes the queues from those of other logs.
            devices: Names of the servers' devices.
            num_workers: N.
            states: What `ServerStates.whole` of an earlier one returned, or nothing.
            max_staleness: As in `bound_of_staleness`.
        """
        self.num_workers = num_workers
        self.devices = tuple(devices)
        bound = bound_of_staleness(max_staleness, num_workers)
        # Of the other workers each may have announced a push that is not in order yet.
        self.queues = Queues(name, devices, {_ORDER: bound - (num_workers - 1)})
        self.states = ServerStates(devices, num_workers, states)
        self._endpoints: dict = {}

    # A worker's half.

    def push(
        self,
        name: str,
        endpoint: ServerEndpoint,
        rank: int | tf.Tensor,
        messages: Sequence[tf.Tensor],
    ) -> list[tf.Operation]:
        """Sends a worker's messages to the servers, and returns what sends them.

        Args:
            name: Name of the endpoint, the same on all workers.
            endpoint: How servers answer there; the first worker's counts.
            rank: The worker's rank.
            messages: int32 vectors, one for each server that answers.
        """
        self._endpoints.setdefault(name, endpoint)
        index = 1 + [*self._endpoints].index(name)
        return [
            self._send(server, tf.concat([tf.stack([index, rank]), message], 0))
            for server, message in enumerate(messages)
        ]

    def announce(
        self, rank: int | tf.Tensor, after: Sequence[tf.Operation]
    ) -> tf.Operation:
        """Enters a push in the order, once all of it has arrived."""
        # Made on the worker: servers do not see each other.
        with tf.control_dependencies(after):
            message = tf.identity(tf.stack([_INDEX_OF_ORDER, rank]))
        return self._send(0, message)

    def _send(self, server, message):
        return self.queues.enqueue(QueueKey("up", _PUSHES, server, None), message)

    def next(self, peer: int) -> tf.Tensor:
        """Returns whose push is the next that a worker of some rank has to apply."""
        return self.queues.dequeue(QueueKey("down", _ORDER, 0, peer), 1)[0]

    def pull(
        self,
        name: str,
        reply_words: Sequence[int | None],
        peer: int,
        pusher: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the servers' replies to the next push of `pusher`.

        Args:
            name: Name of the endpoint.
            reply_words: Words of each server's reply.
            peer: The rank of the worker that pulls.
            pusher: Rank of the one that pushed, int32 scalar.
        """
        replies = []
        for server, words in enumerate(reply_words):
            keys = [_reply_key(name, server, peer, k) for k in range(self.num_workers)]
            branches = [functools.partial(self.queues.dequeue, key) for key in keys]
            reply = tf.switch_case(pusher, branches)
            replies.append(tf.ensure_shape(reply, [words]))
        return replies

    # The half of a server.

    def serve(self, server: int) -> Callable:
        """Returns the half of a server: a function that answers until `stop`.

        Every worker's step must have been traced before.
        """
        # Servers do not see each other: each has the endpoints at which it answers.
        answers: list[Callable | None] = [
            functools.partial(self._answer, name, endpoint, server)
            if server < len(endpoint.words)
            else None
            for name, endpoint in self._endpoints.items()
        ]
        answers.insert(_INDEX_OF_ORDER, self._pass_on if server == 0 else None)

        def answered(answer, message):
            if answer:
                answer(message[1:])
            return tf.constant(True)

        def serve_one(_):
            message = self.queues.dequeue(QueueKey("up", _PUSHES, server, None))
            branches = [functools.partial(answered, one, message) for one in answers]
            return (
                tf.cond(
                    tf.size(message) > 0,
                    lambda: tf.switch_case(message[0], branches),
                    lambda: tf.constant(False),
                ),
            )

        @tf.function(autograph=False)
        def serve():
            with tf.device(self.devices[server]):
                return tf.while_loop(
                    lambda goes_on: goes_on,
                    serve_one,
                    [tf.constant(True)],
                    parallel_iterations=1,
                )[0]

        return serve.get_concrete_function()

    def _answer(self, name, endpoint, server, message):
        words = tf.ensure_shape(message[1:], [endpoint.words[server]])
        reply = endpoint.answer(server, words[tf.newaxis])

        def hand_out(pusher):
            for rank in range(self.num_workers):
                if rank == pusher and endpoint.is_reply_known:
                    continue
                self.queues.enqueue(_reply_key(name, server, rank, pusher), reply)
            return tf.constant(True)

        self._switch(message[0], hand_out)

    def _pass_on(self, message):
        def pass_on(pusher):
            others = [rank for rank in range(self.num_workers) if rank != pusher]
            passed = [self._enter(rank, message) for rank in others]
            # A push that has no room with another worker is not over for its pusher.
            with tf.control_dependencies(passed):
                self._enter(pusher, message)
            return tf.constant(True)

        self._switch(message[0], pass_on)

    def _enter(self, rank, message):
        return self.queues.enqueue(QueueKey("down", _ORDER, 0, rank), message)

    def _switch(self, pusher, branch):
        ranks = range(self.num_workers)
        tf.switch_case(pusher, [functools.partial(branch, rank) for rank in ranks])

    # The end.

    def discard(self, rank: int) -> None:
        """Follows the order to its end in the place of a worker that does not."""

        @tf.function(autograph=False)
        def follow():
            with tf.device(self.devices[0]):
                tf.while_loop(
                    lambda pusher: pusher < self.num_workers,
                    lambda _: (self.next(rank),),
                    [tf.constant(-1)],
                    parallel_iterations=1,
                )

        follow()

    def stop(self) -> None:
        """Makes the servers end when they have answered all that was pushed."""
        for server in range(len(self.devices)):
            with unless_gone():
                self._send(server, tf.zeros([0], tf.int32))

    def end(self) -> None:
        """Ends the order for all workers, after the servers have ended.

        Workers must be following it, or `discard` in their places.
        """
        for rank in range(self.num_workers):
            with unless_gone():
                self._enter(rank, tf.constant([self.num_workers]))

    def close(self) -> None:
        """Ends the waiting of all workers and servers in errors."""
        self.queues.close("up")
        self.queues.close("down")

    def free(self) -> None:
        """Destroys the queues and all that is in them."""
        self.queues.free()


def _reply_key(name, server, rank, pusher):
    return QueueKey("down", name, server, rank, pusher)
