"""Payloads of every compressor: as declared, and the same for split gradients."""

import numpy as np
import tensorflow as tf

from tests import reference
from tests.compressors.contracts import (
    LAYOUTS,
    compress,
    every_layout,
    every_row,
    gradient_of,
    same_bits,
)
from tests.helpers import bits, compress_in_rounds, make_context
from tests.methods import parts_of, second_moments_of
from tfgradcomp.compressors import Codebook, ScaledSign, UniformLevels
from tfgradcomp.core import Layout, SplitVector
from tfgradcomp.transports import messages


def test_the_layouts_have_blocks_of_different_sizes():
    assert LAYOUTS["buckets"].row_splits == (0, 32, 64, 96, 128, 131)
    assert LAYOUTS["model"].row_splits == (0, 97)
    assert LAYOUTS["tensors"].row_splits[:4] == (0, 35, 68, 69)


@every_row
@every_layout
def test_payloads_are_as_declared_and_survive_the_wire(row, layout):
    payload, state, _ = compress(row, gradient_of(layout), layout)
    fields = row.compressor.fields(layout)
    assert payload.keys() == fields.keys()
    for name, field in fields.items():
        if field.base is None:
            assert field.variable_length or payload[name].shape == [field.count], name
            assert payload[name].shape[0] <= field.count
            assert payload[name].dtype == field.dtype, name
        else:
            assert payload[name].dtype == tf.int32, name
            codes = reference.unpack(payload[name].numpy(), field.base, field.count)
            np.testing.assert_array_equal(
                payload[name], reference.pack(codes, field.base), name
            )
    words = messages.pack(payload, fields)
    if not messages.has_variable_length(fields):
        assert words.shape == [messages.message_words(fields)]
    again = messages.unpack(words, fields)
    for name, value in payload.items():
        assert bits(again[name]) == bits(value), name
    vector = row.compressor.decompress(again, layout)
    assert vector.dtype == tf.float32
    assert vector.shape == [layout.size]
    assert bits(vector) == bits(row.compressor.decompress(payload, layout))
    tf.nest.assert_same_structure(state, row.compressor.init(layout))
    for new, old in zip(
        tf.nest.flatten(state),
        tf.nest.flatten(row.compressor.init(layout)),
        strict=True,
    ):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


@every_row
@every_layout
def test_the_first_round_reduces_what_is_declared(row, layout):
    compressor, reduced = row.compressor, []

    def reduce(vector):
        reduced.append((vector.shape[0], vector.dtype))
        return vector

    x, state = tf.constant(gradient_of(layout)), compressor.init(layout)
    context = make_context(moments=second_moments_of(x))
    after_round = compress_in_rounds(compressor, x, state, layout, context, reduce)
    declared = compressor.max_reduced_fields(layout).values()
    assert reduced == [(field.count, field.dtype) for field in declared]
    # Alone, a worker's own part is the maximum.
    assert same_bits(after_round, compressor.compress(x, state, layout, context))


@every_row
@every_layout
def test_a_split_gradient_is_compressed_as_the_flat_one(row, layout):
    x = gradient_of(layout)
    parts = SplitVector(tf.split(tf.constant(x), layout.sizes))
    for compressor in {row.compressor, row.compressor.fused()}:
        state = compressor.init(layout)
        for step in range(2):
            context = make_context(
                step, 5, 1, previous_rate=0.1, moments=second_moments_of(x)
            )
            payload, new_state, _ = compressor.compress(parts, state, layout, context)
            expected, state, _ = compressor.compress(x, state, layout, context)
            assert payload.keys() == expected.keys()
            for name, value in expected.items():
                assert bits(payload[name]) == bits(value), name
            assert same_bits(new_state, state)


@every_row
@every_layout
def test_decoded_vectors_are_split_by_the_sizes_of_the_layout(row, layout):
    payload = compress(row, gradient_of(layout), layout).payload
    vector = row.compressor.decompress(payload, layout)
    whole = Layout(layout.row_splits)
    assert bits(vector) == bits(row.compressor.decompress(payload, whole))
    assert isinstance(row.compressor.decompress(payload, whole), tf.Tensor)
    payloads = {name: tf.stack([value, value]) for name, value in payload.items()}
    mean = row.compressor.mean(payloads, layout)
    assert bits(mean) == bits(row.compressor.mean(payloads, whole))
    for decoded in (vector, mean):
        if isinstance(decoded, SplitVector):
            assert [t.shape for t in decoded] == [[size] for size in layout.sizes]
    inner = parts_of(row.compressor)[-1]
    if isinstance(inner, (UniformLevels, Codebook, ScaledSign)):
        assert isinstance(vector, SplitVector)
