"""Sums of codes: all that some servers need of the payloads."""

import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits, make_context
from tests.selection import rows
from tfgradcomp.core import Layout
from tfgradcomp.testing.inputs import payloads_of

LAYOUT = Layout.from_sizes([70, 1, 30])
every_number = pytest.mark.parametrize("workers", [1, 2, 3])


@rows(lambda row: "all_reduce" in row.transports and not row.adds_numbers)
@every_number
def test_a_sum_of_codes_is_all_that_the_server_needs(row, workers):
    server, compressor = row.server, row.compressor
    payloads = payloads_of(row.method, LAYOUT, workers)
    context = make_context(num_workers=workers)
    update, _ = server.update(payloads, (), LAYOUT, context)
    name, field = server.sum_field(LAYOUT, workers)
    base = compressor.fields(LAYOUT)[name].base
    total = reference.total_codes(payloads[name].numpy(), base, LAYOUT.size)
    words = tf.constant(reference.pack(total, field.base))
    others = {other: v[0] for other, v in payloads.items() if other != name}
    of_sum, _ = server.update_of_sum(words, others, (), LAYOUT, context)
    assert bits(of_sum) == bits(update)
