"""Divisions of a vector among parameter servers: whole, as shards or as relays."""

from __future__ import annotations

import itertools

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.core import Layout, contracts
from tfgradcomp.methods import Method
from tfgradcomp.servers.base import checked_combine
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import Words
from tfgradcomp.transports.sharding import Division, Sharding


class WholeVector(Division):
    """A vector that the first server has as a whole."""

    def __init__(self, method: Method, layout: Layout, num_workers: int):
        super().__init__(method, layout, num_workers)
        # A server does not split decoded vectors by tensors.
        self._server_layout = Layout(layout.row_splits)
        self._payload_fields = method.compressor.fields(layout)
        self._reply_fields = method.server.reply_fields(layout, num_workers)
        self.payload_words = messages.message_words(self._payload_fields)
        self.reply_words = messages.message_words(self._reply_fields)

    @override
    def init_state(self, index):
        return contracts.initial_state(self._method.server, self._server_layout)

    @override
    def messages(self, payload):
        return messages.pack(payload, self._payload_fields)[tf.newaxis]

    @override
    def combine(self, index, rows, state, context):
        payloads = messages.unpack(rows, self._payload_fields)
        reply, state = checked_combine(
            self._method.server,
            payloads,
            state,
            self._server_layout,
            context.at_server(),
            self._reply_fields,
        )
        return messages.pack(reply, self._reply_fields), state

    @override
    def whole_reply(self, rows):
        return messages.unpack(rows[0], self._reply_fields)


class Relay(Division):
    """Servers that pass the payloads of all workers on to all workers.

    Each worker then runs the server's rule. This suits rules without a state if a reply
    would be longer than the payloads, such as the mean of sparse messages.

    Each server receives an equal part of every message, after the part's length. Its
    reply begins with all lengths.
    """

    payload_words = reply_words = None

    def __init__(
        self, method: Method, layout: Layout, num_workers: int, num_servers: int
    ):
        super().__init__(method, layout, num_workers)
        self.num_used = num_servers
        self._fields = method.compressor.fields(layout)

    @staticmethod
    def supports(method: Method, layout: Layout) -> bool:
        """Returns whether a method's server has no state."""
        return not tf.nest.flatten(method.server.init(layout))

    @staticmethod
    def is_shorter(method: Method, layout: Layout, num_workers: int) -> bool:
        """Returns whether all payloads together are shorter than the server's reply."""
        fields = method.compressor.fields(layout)
        if messages.has_variable_length(fields):
            # Methods with messages of variable length send few elements.
            return True
        reply = method.server.reply_fields(layout, num_workers)
        payloads = num_workers * messages.message_words(fields)
        return payloads < messages.message_words(reply)

    @property
    @override
    def words(self):
        words = self.num_used + messages.fixed_words(self._fields)
        return Words(words, self._num_workers * words)

    @override
    def init_state(self, index):
        return ()

    @override
    def messages(self, payload):
        words = messages.pack(payload, self._fields)
        size = tf.size(words)
        width = -(-size // self.num_used)
        ends = [tf.minimum(k * width, size) for k in range(self.num_used + 1)]
        return [
            tf.concat([[end - begin], words[begin:end]], 0)
            for begin, end in itertools.pairwise(ends)
        ]

    @override
    def combine(self, index, rows, state, context):
        lengths = rows[:, 0]
        parts = [rows[i, 1 : lengths[i] + 1] for i in range(self._num_workers)]
        return tf.concat([lengths, *parts], 0), state

    @override
    def decoded(self, replies, context):
        count = self._num_workers
        parts = [tf.split(reply[count:], reply[:count], num=count) for reply in replies]
        rows = [tf.concat(row, 0) for row in zip(*parts, strict=True)]
        if messages.has_variable_length(self._fields):
            longest = tf.reduce_max([tf.size(row) for row in rows])
            rows = [messages.padded(row, longest) for row in rows]
        else:
            words = messages.message_words(self._fields)
            rows = [tf.ensure_shape(row, [words]) for row in rows]
        payloads = messages.unpack(tf.stack(rows), self._fields)
        update, _ = self._method.server.update(
            payloads, (), self._layout, context.at_server()
        )
        return update, {}


def division_for(
    method: Method, layout: Layout, num_workers: int, num_servers: int
) -> Division:
    """Returns the division of a fused method's vector among servers."""
    is_shorter = Relay.is_shorter(method, layout, num_workers)
    if is_shorter and Relay.supports(method, layout):
        return Relay(method, layout, num_workers, num_servers)
    if num_servers == 1 or not Sharding.supports(method, layout):
        return WholeVector(method, layout, num_workers)
    return Sharding(method, layout, num_workers, num_servers)
