"""Every worker is a server: all payloads go to all."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.transports.base import Call, Outcome, Transport
from tfgradcomp.collectives.base import padded_size
from tfgradcomp.transports import messages


class AllGather(Transport):
    """One gather of one int32 vector a step; the reply needs no wire.

    The size is fixed by the fields, so no shapes are exchanged. Where a field varies,
    its sizes travel with the status, and a second gather has the field itself, padded
    to the longest. Every worker runs the server's rule on the same words and so gets
    the same update.
    """

    @override
    def exchange(
        self, payload, compressor, server, server_state, layout, context, status, site
    ):
        fields = compressor.fields(layout)
        words = messages.pack(payload, fields)
        varying = 0
        if messages.varies(fields):
            fixed = messages.fixed_words(fields)
            rest = words[fixed:]
            # What is joined to something that varies has lost its size in a graph.
            words = tf.concat(
                [tf.shape(rest), tf.ensure_shape(words[:fixed], fixed)], 0
            )
        messages = self.collectives.gather(
            tf.concat([status[tf.newaxis], words], 0), site
        )
        statuses, rows = messages[:, 0], messages[:, 1:]
        if messages.varies(fields):
            varying = tf.size(rest)
            if self.collectives.num_workers > 1:
                varying = padded_size(tf.reduce_max(rows[:, 0]))
                rest = messages.padded(rest, varying)
            rest = self.collectives.gather(rest, f"{site}/varying")
            rows = tf.concat([rows[:, 1:], rest], 1)
        payloads = messages.unpack(rows, fields)
        update, server_state = server.update(payloads, server_state, layout, context)
        return Outcome(update, server_state, statuses, varying)

    @override
    def calls(self, compressor, server, layout):
        fields = compressor.fields(layout)
        sizes = 1 if messages.varies(fields) else 0
        return [Call("gather", 1 + sizes + messages.fixed_words(fields))]
