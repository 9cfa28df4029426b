"""Sharded server: every worker is the server of one shard of the vector."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.core import Layout, contracts
from tfgradcomp.transports.base import ExchangeResult, PendingExchange, Route, Transport
from tfgradcomp.transports.sharding import Sharding


class ShardedRoute(Route):
    r"""An all-to-all of payload shards, then an all-gather of the shards' replies.

    A worker receives \( \frac{N-1}{N} (b + r) \) bits per element: b for the payload
    and r for the reply. The server's state is sharded as well.
    """

    def __init__(self, collectives, method, layout, call_site):
        super().__init__(collectives, method, layout, call_site)
        count = self.num_workers
        self._sharding = Sharding(method, layout, count, count)
        self.local_state_size = self._sharding.width

    @override
    def init_state(self):
        layout = Layout.from_sizes([self.local_state_size])
        return contracts.initial_state(self.method.server, layout)

    @override
    def push(self, payload, state, context, flag):
        rows = self._sharding.messages(payload)
        rows = tf.concat([tf.fill([self.num_workers, 1], flag), rows], 1)
        return PendingExchange(
            context, self.collectives.all_to_all(rows, self.call_site)
        )

    @override
    def pull(self, pending, state):
        rows, context = pending.content, pending.context
        rank, sharding = self.collectives.rank, self._sharding
        flags, rows = rows[:, 0], rows[:, 1:]
        size = len(sharding.owned_range(rank))
        state = tf.nest.map_structure(lambda s: s[:size], state)
        words, state = sharding.combine(rank, rows, state, context)
        replies = self.collectives.gather(words, self.call_site)
        reply = sharding.whole_reply(replies)
        state = sharding.finish(rank, rows, words, reply, state, context)
        padding = [[0, sharding.width - size]]
        state = tf.nest.map_structure(lambda s: tf.pad(s, padding), state)
        update = self.method.server.decompress(reply, self.layout, self.num_workers)
        return ExchangeResult(update, state, flags)

    @override
    def owned_range(self, rank):
        return self._sharding.owned_range(rank % self.num_workers)

    @override
    def _exchange_calls(self):
        row = 1 + self._sharding.payload_words
        return [
            CollectiveCall("all_to_all", self.num_workers * row),
            CollectiveCall("gather", self._sharding.reply_words),
        ]


class Sharded(Transport):
    """Cuts the vector into shards and makes every worker the server of one shard."""

    payload_kind = (
        "vectors that can be cut, in blocks of equal size if the server compresses"
    )
    route_class = ShardedRoute

    @override
    def supports(self, method, layout):
        return Sharding.supports(method, layout)
