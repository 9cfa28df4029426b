"""Every worker is a server: all payloads go to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import CollectiveCall, padded_size
from tfgradcomp.core import Context, State
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import ExchangeResult, PendingExchange, Route, Transport


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
        if not self._is_variable:
            message = self.message(payload, flag)
            rows = self.collectives.gather(message, self.call_site)
            return PendingExchange(context, (rows, 0))
        words = messages.pack(payload, self.fields)
        rest = words[self._fixed_words :]
        # What is joined to something that varies has lost its size in a graph.
        fixed = tf.ensure_shape(words[: self._fixed_words], self._fixed_words)
        parts = [flag[tf.newaxis], tf.shape(rest), fixed]
        rows = self.collectives.gather(tf.concat(parts, 0), self.call_site)
        count = tf.size(rest)
        if self.num_workers > 1:
            count = padded_size(tf.reduce_max(rows[:, 1]))
            rest = messages.padded(rest, count)
        rest = self.collectives.gather(rest, f"{self.call_site}/variable")
        rows = tf.concat([rows[:, :1], rows[:, 2:], rest], 1)
        return PendingExchange(context, (rows, count))

    def message(self, payload: dict[str, tf.Tensor], flag: tf.Tensor) -> tf.Tensor:
        """Returns the words of a payload whose length does not vary, after the flag."""
        words = messages.pack(payload, self.fields)
        return tf.concat([flag[tf.newaxis], words], 0)

    @override
    def pull(self, pending, state):
        rows, variable_length_words = pending.content
        payloads = messages.unpack(rows[:, 1:], self.fields)
        update, state = self.method.server.update(
            payloads, state, self.layout, pending.context
        )
        return ExchangeResult(update, state, rows[:, 0], variable_length_words)

    @override
    def _exchange_calls(self):
        lengths = 1 if self._is_variable else 0
        return [CollectiveCall("gather", 1 + lengths + self._fixed_words)]


class AllGather(Transport):
    """Sends every payload to every worker; each of them is a server."""

    route_class = AllGatherRoute


class SharedGather:
    """One gather for the payloads of several routes, instead of one for each.

    Args:
        routes: Routes that it takes, of the same collectives.

    Attributes:
        collectives: What moves vectors between the workers.
    """

    def __init__(self, routes: Sequence[Route]):
        self.collectives = routes[0].collectives
        self._routes = [cast(AllGatherRoute, route) for route in routes]
        self._sizes = [1 + messages.fixed_words(route.fields) for route in self._routes]

    @staticmethod
    def takes(route: Route) -> bool:
        """Returns whether a route sends one message of one size to other workers."""
        is_gather = type(route) is AllGatherRoute and route.num_workers > 1
        return is_gather and not messages.has_variable_length(route.fields)

    def exchange(
        self,
        outgoing: Sequence[tuple[dict[str, tf.Tensor], Context, tf.Tensor]],
        states: Sequence[State],
    ) -> list[ExchangeResult]:
        """Does what `Route.exchange` does, for each of the routes.

        Args:
            outgoing: For each route the payload, the step and the flag.
            states: The servers' states.
        """
        parts = [
            route.message(payload, flag)
            for route, (payload, _, flag) in zip(self._routes, outgoing, strict=True)
        ]
        rows = self.collectives.gather(tf.concat(parts, 0), "shared")
        own = tf.split(rows, self._sizes, axis=1)
        contexts = [context for _, context, _ in outgoing]
        return [
            route.pull(PendingExchange(context, (part, 0)), state)
            for route, context, part, state in zip(
                self._routes, contexts, own, states, strict=True
            )
        ]
