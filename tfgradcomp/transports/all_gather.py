"""Every worker is a server: all payloads go to all."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.transports.base import Call, Transport
from tfgradcomp.wire import words as wire


class AllGather(Transport):
    """One gather of one int32 vector a step; the reply needs no wire.

    The size is fixed by the fields, so no shapes are exchanged. Every worker runs the
    server's rule on the same words and so gets the same update.
    """

    def exchange(
        self, payload, compressor, server, server_state, layout, context, status, site
    ):
        """See `Transport.exchange`."""
        fields = compressor.fields(layout)
        message = tf.concat([status[tf.newaxis], wire.pack(payload, fields)], 0)
        messages = self.collectives.gather(message, site)
        payloads = wire.unpack(messages[:, 1:], fields)
        update, server_state = server.update(payloads, server_state, layout, context)
        return update, server_state, messages[:, 0]

    def calls(self, compressor, server, layout):
        """See `Transport.calls`."""
        return [Call("gather", 1 + wire.message_words(compressor.fields(layout)))]
