"""Rounds in which all workers exchange messages with the parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.parameter_server.channel import Channel
from tfgradcomp.parameter_server.queues import QueueKey, ServerEndpoint


class RoundChannel(Channel):
    """A channel in which servers wait for a message from every worker."""

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
            endpoint: The servers' rule; that of the first call is used.
            peer: The rank of the worker that sends.
            messages: An int32 vector for each server that answers.
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


def _stacked(rows):
    """Stacks messages; shorter messages are padded with zeros."""
    if all(row.shape.is_fully_defined() for row in rows):
        return tf.stack(rows)
    longest = tf.reduce_max([tf.size(row) for row in rows])
    return tf.stack([tf.pad(row, [[0, longest - tf.size(row)]]) for row in rows])
