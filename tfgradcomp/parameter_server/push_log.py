"""Parameter servers without a barrier: a log of pushes that every worker applies.

A worker pushes its gradient without waiting for others. The servers answer each push
separately, as if there were no other, and put the reply into a queue for every pair of
a worker and a pusher, in the order of the pusher's pushes. The first server also
records the order of all pushes. Every worker applies all replies in that order, so the
weights depend only on the position in the log, and no push is lost or applied twice.

The part of the order that a worker has not yet applied is bounded, and so are the
replies that wait for the worker: a push waits until every worker has room for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.core.arguments import check_integer
from tfgradcomp.parameter_server.channel import Channel
from tfgradcomp.parameter_server.queues import QueueKey, ServerEndpoint, unless_gone

_ORDER = "order"
# All workers push into the same queue. A message begins with the index of its
# endpoint, in the order of declaration, and the pusher's rank.
_PUSHES = "pushes"
_INDEX_OF_ORDER = 0
_STALENESS_PER_WORKER = 8


def bound_of_staleness(max_staleness: int | None, num_workers: int) -> int:
    """Returns how many pushes of other workers may precede a worker's push.

    Raises a ValueError if the bound is less than N, since all workers may push at a
    time. The default is 8 N.
    """
    if max_staleness is None:
        return _STALENESS_PER_WORKER * num_workers
    check_integer("max_staleness", max_staleness, num_workers)
    return max_staleness


class PushLog(Channel):
    """A channel by which N workers push and pull without waiting for each other.

    An entry of the order is a worker's rank, or N for the end of the order.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        num_workers: int,
        states: dict[str, list[np.ndarray]],
        max_staleness: int | None = None,
    ):
        """Creates a log; for the arguments see `Channel` and `bound_of_staleness`."""
        bound = bound_of_staleness(max_staleness, num_workers)
        # Each other worker may have announced a push that is not in the order yet.
        capacities = {_ORDER: bound - (num_workers - 1)}
        super().__init__(name, devices, num_workers, states, capacities)

    # Workers.

    def push(
        self,
        name: str,
        endpoint: ServerEndpoint,
        rank: int | tf.Tensor,
        messages: Sequence[tf.Tensor],
    ) -> list[tf.Operation]:
        """Sends a worker's messages, as `RoundChannel.send`; returns the operations."""
        self._endpoints.setdefault(name, endpoint)
        index = 1 + [*self._endpoints].index(name)
        return [
            self._send(server, tf.concat([tf.stack([index, rank]), message], 0))
            for server, message in enumerate(messages)
        ]

    def announce(
        self, rank: int | tf.Tensor, after: Sequence[tf.Operation]
    ) -> tf.Operation:
        """Enters a push into the order, after all its messages have arrived."""
        # The worker does this, because servers do not see each other.
        with tf.control_dependencies(after):
            message = tf.identity(tf.stack([_INDEX_OF_ORDER, rank]))
        return self._send(0, message)

    def _send(self, server, message):
        return self.queues.enqueue(QueueKey("up", _PUSHES, server, None), message)

    def next(self, peer: int) -> tf.Tensor:
        """Returns the pusher of the next push that the worker `peer` has to apply."""
        return self.queues.dequeue(QueueKey("down", _ORDER, 0, peer), 1)[0]

    def pull(
        self,
        name: str,
        reply_words: Sequence[int | None],
        peer: int,
        pusher: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the replies, for the worker `peer`, to the next push of `pusher`.

        `reply_words` has the number of words of each server's reply.
        """
        replies = []
        for server, words in enumerate(reply_words):
            keys = [_reply_key(name, server, peer, k) for k in range(self.num_workers)]
            branches = [functools.partial(self.queues.dequeue, key) for key in keys]
            reply = tf.switch_case(pusher, branches)
            replies.append(tf.ensure_shape(reply, [words]))
        return replies

    # Servers.

    @override
    def serve(self, server):
        """Returns the function by which a server answers until `stop`."""

        def answer_at(name, endpoint):
            # Servers do not see each other: each answers at its endpoints.
            if server < len(endpoint.words):
                return functools.partial(self._answer, name, endpoint, server)
            return None

        answers = [answer_at(*item) for item in self._endpoints.items()]
        answers.insert(_INDEX_OF_ORDER, self._pass_on if server == 0 else None)

        def answered(answer, message):
            if answer:
                answer(message[1:])
            return tf.constant(True)

        def serve_one(_):
            message = self.queues.dequeue(QueueKey("up", _PUSHES, server, None))
            branches = [functools.partial(answered, a, message) for a in answers]
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

        self._switch(message[0], hand_out)

    def _pass_on(self, message):
        def pass_on(pusher):
            others = [rank for rank in range(self.num_workers) if rank != pusher]
            passed = [self._enter(rank, message) for rank in others]
            # The pusher waits until its push has room with every other worker.
            with tf.control_dependencies(passed):
                self._enter(pusher, message)

        self._switch(message[0], pass_on)

    def _enter(self, rank, message):
        return self.queues.enqueue(QueueKey("down", _ORDER, 0, rank), message)

    def _switch(self, pusher, call):
        """Calls a function of the pusher's rank, which is an integer there."""

        def branch(rank):
            call(rank)
            return tf.constant(True)

        ranks = range(self.num_workers)
        tf.switch_case(pusher, [functools.partial(branch, rank) for rank in ranks])

    # The end.

    def discard(self, rank: int) -> None:
        """Reads the order to its end in place of a lost worker."""

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
        """Lets the servers end once they have answered all pushes."""
        for server in range(len(self.devices)):
            with unless_gone():
                self._send(server, tf.zeros([0], tf.int32))

    def end(self) -> None:
        """Ends the order for all workers, after the servers have ended.

        Each worker must be reading the order, or `discard` must read it instead.
        """
        for rank in range(self.num_workers):
            with unless_gone():
                self._enter(rank, tf.constant([self.num_workers]))


def _reply_key(name, server, rank, pusher):
    return QueueKey("down", name, server, rank, pusher)
