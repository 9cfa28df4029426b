"""All-gather: every worker receives all payloads and runs the server."""

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
    """One gather of one int32 vector per step, without a reply.

    All workers run the server's rule on the same words, so their updates are equal. The
    fields fix the vector's size, so no shapes are exchanged. A field of variable length
    needs a second gather, padded to its longest length; the first gather carries the
    lengths.
    """

    sends_shared_fields = False

    def __init__(self, collectives, method, layout, call_site):
        super().__init__(collectives, method, layout, call_site)
        self._is_variable = messages.has_variable_length(self.fields)
        self._fixed_words = messages.fixed_words(self.fields)
        self._most_words = messages.message_words(self.fields) - self._fixed_words

    @override
    def push(self, payload, state, context, flag):
        if not self._is_variable:
            message = self.message(payload, flag)
            rows = self.collectives.gather(message, self.call_site)
            return PendingExchange(context, (rows, 0, payload))
        words = messages.pack(payload, self.fields)
        rest = words[self._fixed_words :]
        # In a graph, concatenation with a field of unknown size loses the static size.
        fixed = tf.ensure_shape(words[: self._fixed_words], self._fixed_words)
        parts = [flag[tf.newaxis], tf.shape(rest), fixed]
        rows = self.collectives.gather(tf.concat(parts, 0), self.call_site)
        count = tf.size(rest)
        if self.num_workers > 1:
            # A length that no payload has must not cost memory.
            longest = tf.clip_by_value(tf.reduce_max(rows[:, 1]), 0, self._most_words)
            count = padded_size(longest)
            rest = messages.padded(rest, count)
        rest = self.collectives.gather(rest, f"{self.call_site}/variable")
        rows = tf.concat([rows[:, :1], rows[:, 2:], rest], 1)
        return PendingExchange(context, (rows, count, payload))

    def message(self, payload: dict[str, tf.Tensor], flag: tf.Tensor) -> tf.Tensor:
        """Returns the flag, followed by the words of a payload of fixed length."""
        words = messages.pack(payload, self.fields)
        return tf.concat([flag[tf.newaxis], words], 0)

    @override
    def pull(self, pending, state):
        rows, variable_length_words, payload = pending.content
        payloads = messages.unpack(rows[:, 1:], self.fields)
        payloads = self.with_shared(payloads, payload)
        update, state = self.method.server.update(
            payloads, state, self.layout, pending.context
        )
        return ExchangeResult(update, state, rows[:, 0], variable_length_words)

    @override
    def _exchange_calls(self):
        lengths = 1 if self._is_variable else 0
        return [CollectiveCall("gather", 1 + lengths + self._fixed_words)]


class AllGather(Transport):
    """Sends every payload to every worker; each worker runs the server."""

    route_class = AllGatherRoute


class SharedGather:
    """One gather for the payloads of several routes, instead of one gather each.

    Args:
        routes: Routes for which `takes` is true, with the same collectives.

    Attributes:
        collectives: The collectives between the workers.
    """

    def __init__(self, routes: Sequence[Route]):
        self.collectives = routes[0].collectives
        self._routes = [cast(AllGatherRoute, route) for route in routes]
        self._sizes = [1 + messages.fixed_words(route.fields) for route in self._routes]

    @staticmethod
    def takes(route: Route) -> bool:
        """Returns whether a route sends one message of fixed size to other workers."""
        is_gather = type(route) is AllGatherRoute and route.num_workers > 1
        return is_gather and not messages.has_variable_length(route.fields)

    def exchange(
        self,
        outgoing: Sequence[tuple[dict[str, tf.Tensor], Context, tf.Tensor]],
        states: Sequence[State],
    ) -> list[ExchangeResult]:
        """Returns the result of `Route.exchange` for each route.

        Args:
            outgoing: The payload, the step and the flag of each route.
            states: The server's state of each route.
        """
        parts = [
            route.message(payload, flag)
            for route, (payload, _, flag) in zip(self._routes, outgoing, strict=True)
        ]
        rows = self.collectives.gather(tf.concat(parts, 0), "shared")
        parts = tf.split(rows, self._sizes, axis=1)
        return [
            route.checked(
                route.pull(PendingExchange(context, (part, 0, payload)), state), state
            )
            for route, (payload, context, _), part, state in zip(
                self._routes, outgoing, parts, states, strict=True
            )
        ]
