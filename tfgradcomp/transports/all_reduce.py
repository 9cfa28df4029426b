"""All-reduce: the sum in the network replaces the server."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import ExchangeResult, PendingExchange, Route, Transport

# Among numbers, a flag is sent as digits that an 8-bit mantissa represents exactly.
_DIGITS, _BASE = 3, 256
_PLACES = (1, _BASE, _BASE**2)


class AllReduceRoute(Route):
    r"""One all-reduce of one vector: the sum of the workers' codes, or their mean.

    Codes of base b are sent in base \( N (b - 1) + 1 \), so that sums of 32-bit words
    have no carry between digits. Numbers are divided by N before the sum, so that half
    floats do not overflow.
    """

    sends_shared_fields = False

    def __init__(self, collectives, method, layout, call_site):
        super().__init__(collectives, method, layout, call_site)
        self._name, self._sum = method.server.sum_field(layout, self.num_workers)
        self._is_codes = self._sum.base is not None

    @override
    def push(self, payload, state, context, flag):
        others = dict(payload)
        values = others.pop(self._name)
        if self._is_codes:
            base = self.fields[self._name].base
            message = ops.sum_codes(
                values[tf.newaxis],
                base,  # type: ignore[arg-type]
                self.layout.size,
                self._sum.base,
            )
            slots = tf.one_hot(context.rank, self.num_workers, flag)
        else:
            message = values / self.num_workers
            digits = flag // tf.constant(_PLACES) % _BASE
            rows = tf.one_hot(context.rank, self.num_workers, dtype=tf.int32)
            table = tf.reshape(rows[:, tf.newaxis] * digits, [-1])
            slots = tf.cast(table, values.dtype)
        total = self.collectives.sum(tf.concat([slots, message], 0), self.call_site)
        return PendingExchange(context, (total, others))

    @override
    def pull(self, pending, state):
        total, others = pending.content
        count = self._slots
        slots, values = total[:count], total[count:]
        if self._is_codes:
            flags = slots
        else:
            table = tf.reshape(tf.cast(slots, tf.int32), [-1, _DIGITS])
            flags = tf.reduce_sum(table * _PLACES, axis=1)
        update, state = self.method.server.update_of_sum(
            values, others, state, self.layout, pending.context
        )
        return ExchangeResult(update, state, flags)

    @property
    def _slots(self):
        return self.num_workers * (1 if self._is_codes else _DIGITS)

    @property
    @override
    def reply_fields(self):
        return {"sum": self._sum}

    @override
    def _exchange_calls(self):
        if self._is_codes:
            return [CollectiveCall("sum", self._slots + messages.words_in(self._sum))]
        field = self._sum._replace(count=self._sum.count + self._slots)
        return [CollectiveCall("sum", messages.words_in(field))]


class AllReduce(Transport):
    """Adds the payloads of all workers in the network, without a server."""

    payload_kind = "payloads that can be added: numbers, or codes of shared levels"
    route_class = AllReduceRoute

    @override
    def supports(self, method, layout):
        summed = method.server.sum_field(layout, self.collectives.num_workers)
        if summed is None:
            return False
        fields = method.compressor.fields(layout).items()
        return {name for name, field in fields if not field.shared} == {summed.name}
