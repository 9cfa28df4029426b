"""Direct exchange: unpacked payloads, the reference for all other transports."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.servers.base import checked_combine
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import ExchangeResult, PendingExchange, Route, Transport


class DirectRoute(Route):
    """Gathers each field separately, unpacked, and runs the server on every worker."""

    sends_shared_fields = False

    @override
    def push(self, payload, state, context, flag):
        gather, site = self.collectives.gather, self.call_site
        payloads = {}
        for name, field in self.fields.items():
            values = payload[name]
            if field.variable_length:
                sizes = gather(tf.shape(values), f"{site}/{name}/size")
                values = messages.padded(values, tf.reduce_max(sizes))
            payloads[name] = gather(values, f"{site}/{name}")
        payloads = self.with_shared(payloads, payload)
        flags = gather(flag[tf.newaxis], f"{site}/flag")[:, 0]
        return PendingExchange(context, (payloads, flags))

    @override
    def pull(self, pending, state):
        payloads, flags = pending.content
        server, layout = self.method.server, self.layout
        reply, state = checked_combine(
            server, payloads, state, layout, pending.context, self.reply_fields
        )
        update = server.decompress(reply, layout, self.num_workers)
        return ExchangeResult(update, state, flags)


class DirectExchange(Transport):
    """Passes payloads to the server without packing them into messages."""

    route_class = DirectRoute
