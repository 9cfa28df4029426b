"""Chunked top-k: its format bit by bit, its values, and what transports cut."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits
from tfgradcomp import methods
from tfgradcomp.compressors import ChunkedTopK, ErrorFeedback, TopK
from tfgradcomp.core import Layout
from tfgradcomp.core.layout import VaryingLayout
from tfgradcomp.servers import Mean
from tfgradcomp.testing.inputs import LAYOUTS, decoded_step, first_step, gradient_of
from tfgradcomp.transports.messages import message_words

FORMATS = [(1, 1, 1), (1, 40, 2), (5, 24, 3), (7, 33, 1), (40, 40, 2), (64, 4096, 3)]


def stream_of(x, k, chunk, number):
    """The bits of a chunk, by the definition: unary, lower bits, values."""
    (sent,) = reference.largest_of_chunks(x, [0, len(x)], k, chunk)
    low = math.floor(math.log2(chunk / k))
    unary = [0] * (k + (chunk - 1 >> low))
    lower, values = [0] * (k * low), [0] * (k * number)
    code, _ = reference.split_at_means(reference.fixed(np.abs(x[sent]))[0], number)
    for i, position in enumerate(sent.tolist()):
        unary[(position >> low) + i] = 1
        for bit in range(low):
            lower[i * low + bit] = position >> bit & 1
        value = int(code[i]) + 2 ** (number - 1) * int(np.signbit(x[position]))
        for bit in range(number):
            values[i * number + bit] = value >> bit & 1
    stream = [*unary, *lower, *values]
    return stream + [0] * (-len(stream) % 32)


@pytest.mark.parametrize(("k", "chunk", "number"), FORMATS)
def test_words_are_those_of_elias_and_fano(k, chunk, number):
    rng = np.random.default_rng(k)
    for size in {chunk, chunk // 2 + 1, 1}:
        x = rng.normal(size=size).astype(np.float32)
        # Equal magnitudes: the first are sent.
        x[rng.random(size) < 0.3] = -1.5
        layout = Layout.from_sizes([size])
        words = first_step(ChunkedTopK(k, chunk, number), x, layout).payload["words"]
        expected = reference.pack(stream_of(x, k, chunk, number), 2)
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("k", "chunk", "number"), FORMATS)
def test_values_are_means_of_parts(k, chunk, number, name):
    layout = LAYOUTS[name]
    x = gradient_of(layout, k)
    found = decoded_step(ChunkedTopK(k, chunk, number), x, layout)
    expected = reference.chunked_top_k(x, layout.row_splits, k, chunk, number)
    assert bits(found) == bits(expected.astype(np.float32) + 0.0)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_as_many_elements_as_top_k_lose_a_little_more(number):
    layout = Layout.from_sizes([2**16], 4096)
    x = np.random.default_rng(0).normal(size=layout.size).astype(np.float32)
    lost, exact = (
        np.sum((decoded_step(c, x, layout) - x) ** 2)
        for c in (ChunkedTopK(bits=number), TopK(64 / 4096))
    )
    assert exact < lost < exact + {1: 0.003, 2: 0.001, 3: 0.0005}[number] * np.sum(x**2)


def test_elements_take_the_bits_that_the_documents_state():
    layout = Layout.from_sizes([2**16], 4096)
    words = [message_words(ChunkedTopK(bits=b).fields(layout)) for b in (1, 2, 3)]
    assert [32 * w / 2**16 for w in words] == [0.14453125, 0.1640625, 0.1875]
    # Positions near their entropy.
    unary_and_low = ChunkedTopK()._format.unary + 64 * 6
    assert (unary_and_low, math.ceil(math.log2(math.comb(4096, 64)))) == (511, 472)


def test_a_short_chunk_sends_its_share():
    layout = Layout.from_sizes([100], 64)
    compressor = ChunkedTopK(8, 64)
    x = gradient_of(layout)
    payload = first_step(compressor, x, layout).payload
    assert np.count_nonzero(compressor.decompress(payload, layout)) == 8 + 5
    assert compressor.elements_sent(payload, layout) == 8 + 5


def test_zeros_infinities_and_tiny_numbers():
    layout, compressor = Layout.from_sizes([48], 24), ChunkedTopK(5, 24, 3)
    for fill in (0.0, -0.0, 1e-40, 1e-38):
        found = decoded_step(compressor, tf.fill([48], fill), layout)
        np.testing.assert_array_equal(found, np.zeros(48))
    x = gradient_of(layout)
    assert first_step(compressor, x, layout).is_finite
    for wrong in (np.inf, -np.inf, np.nan):
        x[30] = wrong
        assert not first_step(compressor, x, layout).is_finite
    # bfloat16 rounds it to infinity.
    assert not first_step(compressor, tf.fill([48], 3.4e38), layout).is_finite


def test_any_words_decode_to_something():
    layout, compressor = Layout.from_sizes([100], 24), ChunkedTopK(5, 24, 2)
    fields = compressor.fields(layout)
    rng = np.random.default_rng(0)
    for _ in range(50):
        words = rng.integers(-(2**31), 2**31, fields["words"].count)
        levels = tf.ones([fields["levels"].count], tf.bfloat16)
        payload = {"words": tf.constant(words, tf.int32), "levels": levels}
        assert np.isfinite(compressor.decompress(payload, layout).numpy()).all()


def test_blocks_whose_number_varies_have_the_same_bits():
    layout, compressor = Layout.from_sizes([100], 24), ChunkedTopK(5, 24, 2)
    x = gradient_of(layout)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        varying = VaryingLayout.from_size(tf.size(x), 24)
        payload = compressor.compress(x, (), varying, None).payload
        return {**payload, "decoded": compressor.decompress(payload, varying)}

    expected = first_step(compressor, x, layout).payload
    expected["decoded"] = compressor.decompress(expected, layout)
    found = step(tf.constant(x))
    assert {k: bits(v) for k, v in found.items()} == {
        k: bits(v) for k, v in expected.items()
    }


def test_shards_have_whole_chunks():
    chunked, layout = ChunkedTopK(64, 512), Layout.from_sizes([5000], 512)
    assert Mean(ErrorFeedback(chunked)).shard_alignment(layout) == 512
    assert Mean(chunked).shard_alignment(Layout.from_sizes([512, 9, 512])) is None
    assert Mean(TopK()).shard_alignment(layout) == 1
    method = methods.chunked_top_k(64, 512)
    assert method.server.shard_alignment(layout) == method.block_size == 512


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0,), "k"),
        ((65, 64), "k"),
        ((1, 0), "chunk"),
        ((1, 2**16 + 1), "chunk"),
        ((1, 2, 0), "bits"),
        ((1, 2, 4), "bits"),
    ],
)
def test_arguments_out_of_range_raise(arguments, name):
    with pytest.raises(ValueError, match=f"{name} must be .*Received: {name}="):
        ChunkedTopK(*arguments)
    with pytest.raises(ValueError, match="reply must be one of.*Received"):
        methods.chunked_top_k(reply="mean")
