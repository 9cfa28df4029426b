"""Parameter servers without a barrier: a log of pushes that every worker follows.

A worker pushes when it has a gradient. The servers answer each push by itself, as if
there were one worker, and put the answer where every worker finds it, for each pusher
in the order of its pushes. The first server also writes down the order of all pushes.
Every worker applies all answers in that order, its own among them: weights are a
function of how much of the log was applied, and nothing is lost or applied twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.parameter_server.queues import (
    Endpoint,
    QueueKey,
    Queues,
    unless_gone,
)
from tfgradcomp.parameter_server.server_state import ServerStates

_ORDER = "order"
# All workers push into one queue on a server.
_ALL = "all"


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
    ):
        """Creates a log.

        Args:
            name: Distinguishes the queues from those of other logs.
            devices: Names of the servers' devices.
            num_workers: N.
            states: What `ServerStates.whole` of an earlier one returned, or nothing.
        """
        self.num_workers = num_workers
        self.devices = tuple(devices)
        self.queues = Queues(name, devices)
        self.states = ServerStates(devices, num_workers, states)
        self._endpoints: dict = {}

    # A worker's half.

    def push(
        self, name: str, endpoint: Endpoint, rank: int, messages: Sequence[tf.Tensor]
    ) -> list[tf.Operation]:
        """Sends a worker's messages to the servers, and returns what sends them.

        Args:
            name: Name of the endpoint, the same on all workers.
            endpoint: How servers answer there; the first worker's counts.
            rank: The worker's rank.
            messages: int32 vectors, one for each server that answers.
        """
        self._endpoints.setdefault(name, endpoint)
        return [
            self.queues.enqueue(
                QueueKey("up", name, server, _ALL), tf.concat([[rank], message], 0)
            )
            for server, message in enumerate(messages)
        ]

    def announce(self, rank: int, after: Sequence[tf.Operation]) -> None:
        """Enters a push in the order, once all of it has arrived."""
        # Made on the worker: servers do not see each other.
        with tf.control_dependencies(after):
            message = tf.identity(tf.constant([rank]))
        self.queues.enqueue(QueueKey("up", _ORDER, 0, _ALL), message)

    def next(self, rank: int) -> tf.Tensor:
        """Returns whose push is the next that a worker has to apply."""
        return self.queues.dequeue(QueueKey("down", _ORDER, 0, rank), 1)[0]

    def pull(
        self,
        name: str,
        reply_words: Sequence[int],
        rank: int,
        pusher: tf.Tensor,
        known_replies: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """Returns the servers' replies to the next push of `pusher`.

        Args:
            name: Name of the endpoint.
            reply_words: Words of each server's reply.
            rank: The rank of the worker that pulls.
            pusher: Rank of the one that pushed, int32 scalar.
            known_replies: The replies to this worker's push, where it knows them.
        """

        def reply_to(of, server):
            if of == rank and known_replies:
                return known_replies[server]
            return self.queues.dequeue(_reply_key(name, server, rank, of))

        replies = []
        for server, words in enumerate(reply_words):
            branches = [
                functools.partial(reply_to, of, server)
                for of in range(self.num_workers)
            ]
            reply = tf.switch_case(pusher, branches)
            replies.append(tf.ensure_shape(reply, [words]))
        return replies

    # The half of a server.

    def serve(self, server: int) -> dict[str, Callable]:
        """Returns the half of a server: a function for each endpoint, until `stop`.

        Every worker's step must have been traced before.
        """
        answers: dict[str, Callable] = {
            name: functools.partial(self._answer, name, endpoint, server)
            for name, endpoint in self._endpoints.items()
            if server < len(endpoint.words)
        }
        if server == 0:
            answers[_ORDER] = self._pass_on
        return {
            name: self._serving(name, answer, server)
            for name, answer in answers.items()
        }

    def _serving(self, name, answer, server):
        """Returns a function that answers messages until an empty one comes."""

        def serve_one(_):
            message = self.queues.dequeue(QueueKey("up", name, server, _ALL))

            def answered():
                answer(message)
                return tf.constant(True)

            is_push = tf.size(message) > 0
            return (tf.cond(is_push, answered, lambda: tf.constant(False)),)

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

        ranks = range(self.num_workers)
        tf.switch_case(
            message[0], [functools.partial(hand_out, pusher) for pusher in ranks]
        )

    def _pass_on(self, message):
        for rank in range(self.num_workers):
            self.queues.enqueue(QueueKey("down", _ORDER, 0, rank), message)

    # The end.

    def stop(self) -> None:
        """Makes the servers end when they have answered all that was pushed."""
        ends = [QueueKey("up", _ORDER, 0, _ALL)]
        for name, endpoint in self._endpoints.items():
            servers = range(len(endpoint.words))
            ends += [QueueKey("up", name, server, _ALL) for server in servers]
        for key in ends:
            with unless_gone():
                self.queues.enqueue(key, tf.zeros([0], tf.int32))

    def end(self) -> None:
        """Ends the order for all workers, after the servers have ended."""
        for rank in range(self.num_workers):
            with unless_gone():
                end = tf.constant([self.num_workers])
                self.queues.enqueue(QueueKey("down", _ORDER, 0, rank), end)

    def free(self) -> None:
        """Destroys the queues and all that is in them."""
        self.queues.free()


def _reply_key(name, server, rank, pusher):
    return QueueKey("down", name, server, f"{rank} from {pusher}")
