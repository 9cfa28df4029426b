"""Signs: what becomes of zeros, and the scale of a block."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp.compressors import ScaledSign, Sign
from tfgradcomp.core import Layout

pytestmark = pytest.mark.python_ops


def decoded(compressor, x, layout=None, **context):
    layout = layout or Layout.from_sizes([len(x)])
    x = tf.constant(x, tf.float32)
    compressed = compressor.compress(
        x, compressor.init(layout), layout, make_context(**context)
    )
    return compressor.decompress(compressed.payload, layout).numpy()


def mixed():
    x = np.random.default_rng(0).normal(size=200).astype(np.float32)
    x[::4], x[1::4] = 0.0, -0.0
    return x


@pytest.mark.parametrize("step", [0, 1, 1000])
def test_the_sign_of_zero_is_the_shared_coin(step):
    x = mixed()
    expected = reference.sign(x, 42, step)
    assert {*expected[::4]} == {*expected[1::4]} == {-1, 1}
    for rank in range(3):
        signs = decoded(Sign(), x, step=step, seed=42, rank=rank)
        np.testing.assert_array_equal(signs, expected)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_sign_of_zero_does_not_drift(zero):
    steps, size = 200, 1000
    total = np.zeros(size)
    for step in range(steps):
        signs = decoded(Sign(), np.full(size, zero), step=step, seed=1)
        assert (np.abs(signs) == 1).all()
        total += signs
    z = total / np.sqrt(steps)
    assert abs(total.sum()) < 5 * np.sqrt(steps * size)
    # No element drifts by itself either: chi-square of `size` degrees.
    assert abs(np.sum(z**2) - size) < 5 * np.sqrt(2 * size)


def test_the_scale_is_the_mean_magnitude_not_the_root_mean_square():
    x = np.array([3.0, -1.0, 0.0, 0.0, 2.0, -2.0, 8.0], np.float32)
    layout = Layout.from_sizes([4, 2, 1])
    vector = decoded(ScaledSign(), x, layout)
    np.testing.assert_array_equal(vector, [1, -1, 1, 1, 2, -2, 8])


def test_a_short_bucket_counts_only_its_own_elements():
    x = np.array([1, 1, 1, 1, 1, -1, 4.5, 1.5], np.float32)
    vector = decoded(ScaledSign(), x, Layout.from_sizes([8], 6))
    np.testing.assert_array_equal(vector, [1, 1, 1, 1, 1, -1, 3, 3])


def test_the_scale_of_the_largest_floats_does_not_overflow():
    x = np.resize(np.array([3e38, -3e38], np.float32), 1000)
    np.testing.assert_allclose(decoded(ScaledSign(), x), x, rtol=1e-6)


def test_both_zeros_are_plus_on_the_wire_of_the_scaled_sign():
    x = np.array([0.0, -0.0, -2.0, 4.0], np.float32)
    np.testing.assert_array_equal(decoded(ScaledSign(), x), [1.5, 1.5, -1.5, 1.5])


@pytest.mark.parametrize("layout", [[97], [13, 50, 1, 33]])
def test_the_scaled_sign_is_that_of_the_reference(layout):
    x = np.random.default_rng(3).laplace(size=97).astype(np.float32)
    layout = Layout.from_sizes(layout)
    np.testing.assert_allclose(
        decoded(ScaledSign(), x, layout),
        reference.scaled_sign(x.astype(np.float64), layout.row_splits),
        rtol=1e-6,
    )
