"""Contracts of the server's half of a method. A function's name is the contract."""

from __future__ import annotations

from tfgradcomp.core import Layout
from tfgradcomp.core.contracts import check_vector
from tfgradcomp.methods import Method
from tfgradcomp.servers.base import checked_combine
from tfgradcomp.testing.compressor_contracts import check_message
from tfgradcomp.testing.errors import require_finite, require_same_bits
from tfgradcomp.testing.inputs import make_context, payloads_of

_LAYOUT = Layout.from_sizes([70, 1, 30])


def replies_are_as_declared_and_survive_the_wire(
    method: Method, num_workers: int
) -> None:
    """Checks the fields, words and decoded vector of a reply."""
    server, context = method.server, make_context(num_workers=num_workers)
    payloads = payloads_of(method, _LAYOUT, num_workers)
    fields = server.reply_fields(_LAYOUT, num_workers)
    state = server.init(_LAYOUT)
    reply, _ = checked_combine(server, payloads, state, _LAYOUT, context, fields)
    check_message(reply, fields)
    update = server.decompress(reply, _LAYOUT, num_workers)
    check_vector(server, "decompress", update, _LAYOUT)
    require_finite("the update", update)


def updates_are_decoded_replies(method: Method, num_workers: int) -> None:
    """Checks `update`, and the server in one pass, against `combine`."""
    payloads = payloads_of(method, _LAYOUT, num_workers)
    context = make_context(num_workers=num_workers, previous_rate=0.1)
    expected = None
    for server in (method.server, method.fused().server):
        state, decoded, updates = server.init(_LAYOUT), [], []
        for _ in range(2):
            updates.append(server.update(payloads, state, _LAYOUT, context))
            reply, state = server.combine(payloads, state, _LAYOUT, context)
            vector = server.decompress(reply, _LAYOUT, num_workers)
            decoded.append((vector, state))
        require_same_bits("`update` and the decoded reply", updates, decoded)
        expected = expected or decoded
        require_same_bits("the updates in one pass and link by link", updates, expected)
