"""Every worker is a server: all payloads go to all."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import Call, padded_size
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import ExchangeResult, Flight, Route, Transport


class AllGatherRoute(Route):
    """One gather of one int32 vector a step; the reply needs no wire.

    The size is fixed by the fields, so no shapes are exchanged. Where a field has a
    variable length, the lengths travel with the flags, and a second gather has the
    field itself, padded to the longest. Every worker runs the server's rule on the same
    words and so gets the same update.
    """

    def __init__(self, collectives, method, layout, call_site):
        super().__init__(collectives, method, layout, call_site)
        self._is_variable = messages.has_variable_length(self.fields)
        self._fixed_words = messages.fixed_words(self.fields)

    @override
    def push(self, payload, state, context, flag):
        words = messages.pack(payload, self.fields)
        if not self._is_variable:
            return Flight(context, (self._gather([flag[tf.newaxis], words]), 0))
        rest = words[self._fixed_words :]
        # What is joined to something that varies has lost its size in a graph.
        fixed = tf.ensure_shape(words[: self._fixed_words], self._fixed_words)
        rows = self._gather([flag[tf.newaxis], tf.shape(rest), fixed])
        count = tf.size(rest)
        if self.num_workers > 1:
            count = padded_size(tf.reduce_max(rows[:, 1]))
            rest = messages.padded(rest, count)
        rest = self.collectives.gather(rest, f"{self.call_site}/variable")
        rows = tf.concat([rows[:, :1], rows[:, 2:], rest], 1)
        return Flight(context, (rows, count))

    def _gather(self, parts):
        return self.collectives.gather(tf.concat(parts, 0), self.call_site)

    @override
    def pull(self, flight, state):
        rows, variable_words = flight.content
        payloads = messages.unpack(rows[:, 1:], self.fields)
        update, state = self.method.server.update(
            payloads, state, self.layout, flight.context
        )
        return ExchangeResult(update, state, rows[:, 0], variable_words)

    @override
    def _exchange_calls(self):
        lengths = 1 if self._is_variable else 0
        return [Call("gather", 1 + lengths + self._fixed_words)]


class AllGather(Transport):
    """Sends every payload to every worker; each of them is a server."""

    route_class = AllGatherRoute
