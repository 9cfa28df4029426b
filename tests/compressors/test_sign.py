"""Signs: what becomes of zeros, and the scale of a block."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp.compressors import Momentum, ScaledSign, Sign
from tfgradcomp.compressors.momentum import warmup_steps_for
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


def test_momentum_is_damped_and_starts_at_zero():
    layout = Layout.from_sizes([50])
    rng = np.random.default_rng(4)
    compressor = Momentum(Sign(), 0.75)
    state, m = compressor.init(layout), np.zeros(50)
    for step in range(6):
        x = rng.normal(size=50)
        m = 0.75 * m + 0.25 * x
        payload, state, _ = compressor.compress(
            tf.constant(x, tf.float32), state, layout, make_context(step=step)
        )
        signs = compressor.decompress(payload, layout)
        np.testing.assert_array_equal(signs, np.sign(m))
        np.testing.assert_allclose(state["momentum"], m, rtol=1e-4, atol=1e-6)
        assert step == 0 or (np.sign(m) != np.sign(x)).any()


def test_warm_up_sends_the_gradient_while_momentum_accumulates():
    layout = Layout.from_sizes([50])
    rng = np.random.default_rng(5)
    compressor = Momentum(Sign(), 0.9, warmup_steps=3)
    state, m = compressor.init(layout), np.zeros(50)
    for step in range(6):
        x = rng.normal(size=50)
        m = 0.9 * m + 0.1 * x
        payload, state, _ = compressor.compress(
            tf.constant(x, tf.float32), state, layout, make_context(step=step)
        )
        signs = compressor.decompress(payload, layout)
        np.testing.assert_array_equal(signs, np.sign(x if step < 3 else m))


def test_the_warm_up_of_the_paper():
    assert warmup_steps_for(0.9) == 54
    for beta in (0.0, 0.3, 0.5, 0.8, 0.95, 0.99):
        # C / 2 b^C <= 1 / (1 - b^2) / (C + 1), from C on.
        c = np.arange(1, 10_000)
        fails = c / 2 * beta**c > 1 / (1 - beta**2) / (c + 1)
        assert warmup_steps_for(beta) == 1 + max(c[fails], default=0)
