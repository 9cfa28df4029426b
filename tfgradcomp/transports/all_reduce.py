"""The server is in the network's sum."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.transports.base import Transport, Words
from tfgradcomp.wire import words as wire

# A status travels as digits that even an 8-bit mantissa holds exactly.
_DIGITS, _BASE = 3, 256


class AllReduce(Transport):
    """One all-reduce of one vector of numbers: the workers' mean.

    For compressors with one field of numbers, where the server needs no more of the
    payloads than their mean.
    """

    def exchange(
        self, payload, compressor, server, server_state, layout, context, status, site
    ):
        """See `Transport.exchange`."""
        num_workers = self.collectives.num_workers
        name = _the_field(compressor.fields(layout))
        values = payload[name]
        digits = status // tf.constant([1, _BASE, _BASE**2]) % _BASE
        slots = tf.one_hot(context.rank, num_workers, dtype=tf.int32)
        table = tf.reshape(slots[:, tf.newaxis] * digits, [-1])
        # Divided first: a sum of half floats must not overflow.
        message = tf.concat([tf.cast(table, values.dtype), values / num_workers], 0)
        total = self.collectives.sum(message, site)
        table = tf.cast(total[: num_workers * _DIGITS], tf.int32)
        statuses = tf.reduce_sum(
            tf.reshape(table, [num_workers, _DIGITS]) * [1, _BASE, _BASE**2], axis=1
        )
        mean = {name: total[tf.newaxis, num_workers * _DIGITS :]}
        update, server_state = server.update(mean, server_state, layout, context)
        return update, server_state, statuses

    def reply_fields(self, compressor, server, layout, num_workers):
        """See `Transport.reply_fields`."""
        return compressor.fields(layout)  # The sum comes back as the summands went.

    def words(self, fields, num_workers):
        """See `Transport.words`."""
        field = fields[_the_field(fields)]
        message = field._replace(count=field.count + num_workers * _DIGITS)
        # A ring: every element is sent and received twice, less the own part.
        moved = 2 * (num_workers - 1) / num_workers * wire.words_in(message)
        return Words(sent=moved, received=moved)


def can_carry(fields) -> bool:
    """Returns whether an all-reduce can add up a payload of these fields."""
    return len(fields) == 1 and all(field.base is None for field in fields.values())


def _the_field(fields) -> str:
    if not can_carry(fields):
        raise ValueError(
            "The transport 'all_reduce' adds up one field of numbers; codes need "
            f"transport='all_gather'. Received: fields={fields}"
        )
    return next(iter(fields))
