"""Replies of every method's server: as declared, and the same by every way."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits, compress_in_rounds, make_context
from tests.methods import second_moments_of
from tests.selection import rows
from tfgradcomp.core import Layout
from tfgradcomp.transports import messages

LAYOUT = Layout.from_sizes([70, 1, 30])
every_number = pytest.mark.parametrize("workers", [1, 2, 3])


def payloads_of(row, workers, step=0):
    """The payloads of workers with different gradients, stacked."""
    rng = np.random.default_rng([step, workers])
    vectors = rng.normal(size=(workers, LAYOUT.size)).astype(np.float32)
    compressor, state = row.compressor, row.compressor.init(LAYOUT)
    contexts = [
        make_context(rank=rank, num_workers=workers, moments=second_moments_of(x))
        for rank, x in enumerate(vectors)
    ]
    prepared = [
        compressor.prepare(tf.constant(x), state, LAYOUT, context)
        for x, context in zip(vectors, contexts, strict=True)
    ]
    names = [*compressor.max_reduced_fields(LAYOUT)]
    largest = {
        name: tf.reduce_max([local[name] for local in prepared], 0) for name in names
    }
    payloads = []
    for x, context in zip(vectors, contexts, strict=True):
        maxima = iter(largest.values())
        compressed = compress_in_rounds(
            compressor,
            tf.constant(x),
            state,
            LAYOUT,
            context,
            lambda _, maxima=maxima: next(maxima),
        )
        payloads.append(compressed.payload)
    stacked = {}
    for name, field in compressor.fields(LAYOUT).items():
        values = [payload[name] for payload in payloads]
        if field.variable_length:
            longest = max(value.shape[0] for value in values)
            values = [messages.padded(value, longest) for value in values]
        stacked[name] = tf.stack(values)
    return stacked


@rows()
@every_number
def test_replies_are_as_declared_and_survive_the_wire(row, workers):
    server = row.server
    context = make_context(num_workers=workers)
    reply, state = server.combine(
        payloads_of(row, workers), server.init(LAYOUT), LAYOUT, context
    )
    fields = server.reply_fields(LAYOUT, workers)
    assert reply.keys() == fields.keys()
    for name, field in fields.items():
        if field.base is None:
            assert reply[name].shape == [field.count], name
            assert reply[name].dtype == field.dtype, name
        else:
            codes = reference.unpack(reply[name].numpy(), field.base, field.count)
            np.testing.assert_array_equal(
                reply[name], reference.pack(codes, field.base), name
            )
    again = messages.unpack(messages.pack(reply, fields), fields)
    for name, value in reply.items():
        assert bits(again[name]) == bits(value), name
    update = server.decompress(reply, LAYOUT, workers)
    assert update.shape == [LAYOUT.size]
    assert np.isfinite(np.asarray(update)).all()
    tf.nest.assert_same_structure(state, server.init(LAYOUT))


@rows()
@every_number
def test_an_update_is_the_decoded_reply_and_fusing_changes_no_bit(row, workers):
    payloads, results = payloads_of(row, workers), []
    context = make_context(num_workers=workers, previous_rate=0.1)
    for server in (row.server, row.server.fused()):
        state = server.init(LAYOUT)
        for _ in range(2):
            reply, new_state = server.combine(payloads, state, LAYOUT, context)
            update, same_state = server.update(payloads, state, LAYOUT, context)
            assert bits(update) == bits(server.decompress(reply, LAYOUT, workers))
            state = new_state
            states = [*tf.nest.flatten(state), *tf.nest.flatten(same_state)]
            results.append([bits(update), *map(bits, states)])
    assert results[:2] == results[2:]


@rows(lambda row: "all_reduce" in row.transports and not row.adds_numbers)
@every_number
def test_a_sum_of_codes_is_all_that_the_server_needs(row, workers):
    server, compressor = row.server, row.compressor
    payloads = payloads_of(row, workers)
    context = make_context(num_workers=workers)
    update, _ = server.update(payloads, (), LAYOUT, context)
    name, field = server.sum_field(LAYOUT, workers)
    base = compressor.fields(LAYOUT)[name].base
    total = reference.total_codes(payloads[name].numpy(), base, LAYOUT.size)
    words = tf.constant(reference.pack(total, field.base))
    others = {other: v[0] for other, v in payloads.items() if other != name}
    of_sum, _ = server.update_of_sum(words, others, (), LAYOUT, context)
    assert bits(of_sum) == bits(update)
