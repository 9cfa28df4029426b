"""The server is in the network's sum."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.servers.mean import Mean
from tfgradcomp.transports.base import Call, Outcome, Transport
from tfgradcomp.transports import messages

# A status travels as digits that even an 8-bit mantissa holds exactly.
_DIGITS, _BASE = 3, 256


class AllReduce(Transport):
    r"""One all-reduce of one vector: the sum of the workers' codes, or their mean.

    Codes travel in the base of their sum, \( N (b - 1) + 1 \) for base b: 32-bit words
    of such digits add up without a carry from one digit to the next. Numbers are
    divided by N first; half floats must not overflow.
    """

    carries = "what can be added up: numbers, or codes of levels that all workers share"

    def can_carry(self, compressor, server, layout):
        """The server must need no more of the payloads than their sum."""
        fields = compressor.fields(layout)
        if server.sum_base(layout, self.collectives.num_workers) is not None:
            return fields.keys() - compressor.agreed(layout).keys() == {"codes"}
        numbers = [f.base is None and not f.varies for f in fields.values()]
        return isinstance(server, Mean) and numbers == [True]

    @override
    def exchange(
        self, payload, compressor, server, server_state, layout, context, status, site
    ):
        if server.sum_base(layout, context.num_workers) is None:
            return self._exchange_numbers(
                payload, server, server_state, layout, context, status, site
            )
        payload = dict(payload)
        message = ops.sum_codes(
            payload.pop("codes")[tf.newaxis],
            compressor.fields(layout)["codes"].base,
            layout.size,
            server.sum_base(layout, context.num_workers),
        )
        slots = tf.one_hot(context.rank, context.num_workers, status)
        total = self.collectives.sum(tf.concat([slots, message], 0), site)
        statuses, words = tf.split(total, [slots.shape[0], message.shape[0]])
        update, server_state = server.update_of_sum(
            words, payload, server_state, layout, context
        )
        return Outcome(update, server_state, statuses)

    def _exchange_numbers(
        self, payload, server, server_state, layout, context, status, site
    ):
        num_workers = context.num_workers
        ((name, values),) = payload.items()
        digits = status // tf.constant([1, _BASE, _BASE**2]) % _BASE
        slots = tf.one_hot(context.rank, num_workers, dtype=tf.int32)
        table = tf.reshape(slots[:, tf.newaxis] * digits, [-1])
        message = tf.concat([tf.cast(table, values.dtype), values / num_workers], 0)
        total = self.collectives.sum(message, site)
        table = tf.cast(total[: num_workers * _DIGITS], tf.int32)
        statuses = tf.reduce_sum(
            tf.reshape(table, [num_workers, _DIGITS]) * [1, _BASE, _BASE**2], axis=1
        )
        mean = {name: total[tf.newaxis, num_workers * _DIGITS :]}
        update, server_state = server.update(mean, server_state, layout, context)
        return Outcome(update, server_state, statuses)

    @override
    def reply_fields(self, compressor, server, layout, num_workers):
        return {"sum": _summed(compressor, server, layout, num_workers)}

    @override
    def calls(self, compressor, server, layout):
        num_workers = self.collectives.num_workers
        field = _summed(compressor, server, layout, num_workers)
        if field.base is not None:
            return [Call("sum", num_workers + messages.words_in(field))]
        slots = num_workers * _DIGITS
        return [Call("sum", messages.words_in(field._replace(count=field.count + slots)))]


def _summed(compressor, server, layout, num_workers):
    """What is added up: codes in the base of their sum, or numbers."""
    fields = compressor.fields(layout)
    base = server.sum_base(layout, num_workers)
    if base is not None:
        return fields["codes"]._replace(base=base)
    (field,) = fields.values()
    return field
