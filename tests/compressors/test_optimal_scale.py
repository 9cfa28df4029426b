"""`OptimalScale` against least squares in NumPy, and its use for error feedback."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import make_context
from tfgradcomp.compressors import (
    QSGD,
    BinGrad,
    Clip,
    ErrorFeedback,
    NaturalCompression,
    OptimalScale,
    Sign,
    Ternary,
    TopK,
)
from tfgradcomp.core import Layout

LAYOUT = Layout.from_sizes([300, 1, 40])
SPLITS = LAYOUT.row_splits


def compress(compressor, x, **context):
    state = compressor.init(LAYOUT)
    return compressor.compress(tf.constant(x), state, LAYOUT, make_context(**context))


def gradient(seed=0, scale=1.0):
    x = np.random.default_rng(seed).standard_t(3, LAYOUT.size) * scale
    return x.astype(np.float32)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_factors_are_those_of_any_scale(scale):
    factors = [
        compress(OptimalScale(QSGD(3)), gradient(scale=s)).payload["factor"]
        for s in (1.0, scale)
    ]
    np.testing.assert_allclose(*factors, rtol=1e-3)


def test_a_block_that_became_zero_keeps_the_factor_1():
    payload = compress(OptimalScale(QSGD(3)), np.zeros(LAYOUT.size, np.float32)).payload
    np.testing.assert_array_equal(payload["factor"], 1.0)


@pytest.mark.slow
def test_what_is_kept_on_average_is_what_the_variance_leaves():
    """||v||^2 / (1 + omega), omega the relative variance of the three levels."""
    x = gradient()[:300].astype(np.float64)
    layout = Layout((0, 300))
    omega = np.abs(x).max() * np.abs(x).sum() / np.sum(x**2) - 1
    left = []
    for step in range(300):
        c = OptimalScale(Ternary(False))
        given = tf.constant(x, tf.float32)
        payload = c.compress(given, (), layout, make_context(step=step)).payload
        left.append(np.sum((c.decompress(payload, layout) - x) ** 2))
    most = np.sum(x**2) * (1 - 1 / (1 + omega))
    # So that without the factor the error is larger than the vector.
    assert omega > 1
    assert np.mean(left) <= most * 1.01
    assert max(left) <= np.sum(x**2) * (1 + 1e-6)


def final_residual(compressor, steps=200, size=2000):
    """The length of the residual after each step, in that of a gradient."""
    rng, layout = np.random.default_rng(0), Layout((0, size))
    state, lengths = compressor.init(layout), []
    for step in range(steps):
        g = tf.constant(rng.normal(size=size), tf.float32)
        context = make_context(step=step, previous_rate=0.1 if step else 0.0)
        _, state, _ = compressor.compress(g, state, layout, context)
        lengths.append(np.linalg.norm(state["residual"]) / np.sqrt(size))
    return lengths


@pytest.mark.slow
def test_the_residual_grows_without_the_factor_only():
    grows, stays = (
        final_residual(ErrorFeedback(c))
        for c in (Ternary(False), OptimalScale(Ternary(False)))
    )
    assert grows[-1] > 10
    assert max(stays) < 2


def test_what_contracts_by_itself_is_taken_as_it_is():
    sgd = keras.optimizers.SGD
    for c in (TopK(), BinGrad(), NaturalCompression()):
        assert tfgradcomp.DistEFSGD(sgd(), c).method.compressor == ErrorFeedback(c)
    for c in (QSGD(), BinGrad("pb"), Sign()):
        method = tfgradcomp.DistEFSGD(sgd(), c).method
        assert method.compressor == ErrorFeedback(OptimalScale(c))
        assert method.server.compressor == OptimalScale(c)
    clipped = tfgradcomp.BinGrad(sgd(), clip_factor=2.0, error_feedback=True).method
    assert clipped.compressor == ErrorFeedback(OptimalScale(Clip(BinGrad(), 2.0)))
    assert clipped.server.compressor == OptimalScale(BinGrad())
