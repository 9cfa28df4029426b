"""Natural compression against the paper's formula, and at the borders of float32."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp.compressors import NaturalCompression
from tfgradcomp.core import Layout
from tfgradcomp.transports.messages import message_words

LARGEST = np.finfo(np.float32).max
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def compress(x, sizes=None, **context):
    """What is decoded, and whether the step is finite."""
    x = np.asarray(x, np.float32)
    layout = Layout.from_sizes(sizes or [len(x)])
    compressed = NaturalCompression().compress(
        tf.constant(x), (), layout, make_context(**context)
    )
    vector = NaturalCompression().decompress(compressed.payload, layout)
    return vector.numpy(), bool(compressed.is_finite)


def natural(v, coins):
    """Definition 1 of the paper: down with probability (2^ceil - |t|) / 2^floor."""
    v = np.asarray(v, np.float64)
    floor = 2.0 ** np.floor(np.log2(np.abs(v)))
    probability = (2 * floor - np.abs(v)) / floor
    # A coin is that of going to the greater number: of a negative one, to -floor.
    goes_down = np.where(v > 0, coins >= 1 - probability, coins < probability)
    return np.sign(v) * np.where(goes_down, floor, 2 * floor)


def draws(x, count):
    """Decoded vectors of many steps, `[count, size]`."""
    layout, x = Layout.from_sizes([len(x)]), tf.constant(x, tf.float32)
    compressor = NaturalCompression()

    @tf.function
    def all_of():
        def draw(step):
            context = make_context(step=step, seed=3)
            compressed = compressor.compress(x, (), layout, context)
            return compressor.decompress(compressed.payload, layout)

        return tf.map_fn(draw, tf.range(count), fn_output_signature=tf.float32)

    return all_of().numpy().astype(np.float64)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20, 1e30])
def test_values_are_those_of_the_paper(scale):
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=500) * 10.0 ** rng.uniform(-6, 6, 500)).astype("f")
    for step, rank in ((0, 0), (17, 3)):
        vector, is_finite = compress(x, [300, 200], step=step, rank=rank, seed=8)
        coins = reference.uniform(500, 8, step, rank)
        np.testing.assert_array_equal(vector, natural(x, coins))
        assert is_finite


def test_what_is_below_the_smallest_power_is_unbiased():
    # Beside 2^20 the smallest level is 2^(21 - 126).
    smallest, count = 2.0**-105, 3000
    x = np.array([2.0**20, 0.3 * smallest, -0.8 * smallest, 1e-3 * smallest])
    samples = draws(x.astype(np.float32), count)[:, 1:] / smallest
    assert {*np.unique(samples)} == {-1.0, 0.0, 1.0}
    p = np.array([0.3, -0.8, 1e-3])
    z = (samples.mean(0) - p) / np.sqrt(np.abs(p) * (1 - np.abs(p)) / count)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_stay_finite_and_unbiased(sign):
    assert compress(np.full(5, sign * LARGEST))[0].tolist() == [sign * LARGEST] * 5
    x = sign * np.float32(2.5e38)
    samples = sign * draws([x] * 500, 50)
    low, high = 2.0**127, float(LARGEST)
    assert {*np.unique(samples)} == {low, high}
    p = (sign * float(x) - low) / (high - low)
    z = (np.mean(samples == high) - p) / np.sqrt(p * (1 - p) / samples.size)
    assert abs(z) < 5


def test_denormals_alone_become_zeros():
    x = np.float32([1e-40, -1e-44, 0.0, -0.0])
    vector, is_finite = compress(x)
    np.testing.assert_array_equal(vector, 0)
    assert is_finite


def test_a_denormal_beside_the_smallest_normals_becomes_one_of_them_or_zero():
    x = np.resize(np.float32([2 * SMALLEST_NORMAL, 5e-39, -5e-39]), 300)
    vector, is_finite = compress(x)
    assert is_finite
    np.testing.assert_array_equal(vector[::3], x[::3])
    small = np.abs(np.delete(vector, np.s_[::3]))
    assert {*np.unique(small)} <= {0.0, float(SMALLEST_NORMAL)}
    assert not np.signbit(vector[vector == 0]).any()


def test_an_element_takes_eight_bits_and_a_block_a_byte():
    layout = Layout.from_sizes([2048 * 1000], 2048)
    words = message_words(NaturalCompression().fields(layout))
    assert 32 * words == 8 * layout.size + 8 * layout.num_blocks
