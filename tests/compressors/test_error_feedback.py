"""Error feedback: the residual and its unit, to the last bit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits, make_context
from tfgradcomp.compressors import (
    ErrorFeedback,
    NesterovMomentum,
    ScaledSign,
    TopK,
)
from tfgradcomp.core import Layout

LAYOUT = Layout.from_sizes([30, 1, 20])


def run(compressor, gradients, rates):
    """Pairs (decoded, residual) of a run."""
    state, previous, pairs = compressor.init(LAYOUT), 0.0, []
    for step, (g, rate) in enumerate(zip(gradients, rates, strict=True)):
        context = make_context(step=step, rate=rate, previous_rate=previous)
        payload, state, _ = compressor.compress(
            tf.constant(g, tf.float32), state, LAYOUT, context
        )
        previous = rate or previous
        inner = state if "residual" in state else state["inner"]
        decoded = compressor.decompress(payload, LAYOUT).numpy()
        pairs.append((decoded, inner["residual"].numpy()))
    return pairs


def gradients_of(steps, seed=0):
    return np.random.default_rng(seed).normal(size=(steps, 51)).astype(np.float32)


RATES = [0.1, 0.1, 0.2, 0.0, 0.0, 0.05, 0.05, 1.0]


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_runs_are_those_of_the_reference(momentum):
    compressor = ErrorFeedback(ScaledSign())
    if momentum is not None:
        compressor = NesterovMomentum(compressor, momentum)
    gradients = gradients_of(len(RATES))
    e, m, unit = np.zeros(51), np.zeros(51), 0.0
    for g, rate, (decoded, residual) in zip(
        gradients, RATES, run(compressor, gradients, RATES), strict=True
    ):
        m = (momentum or 0.0) * m + g
        p = (momentum or 0.0) * m + g + (unit / rate * e if rate else 0.0)
        sent = reference.scaled_sign(p, LAYOUT.row_splits)
        if rate:
            e, unit = p - sent, rate
        np.testing.assert_allclose(decoded, sent, rtol=1e-4)
        np.testing.assert_allclose(residual, e, rtol=1e-4, atol=1e-5)


def test_a_step_without_a_rate_keeps_the_residual_to_the_bit():
    pairs = run(ErrorFeedback(ScaledSign()), gradients_of(len(RATES)), RATES)
    assert bits(pairs[2][1]) == bits(pairs[3][1]) == bits(pairs[4][1])
    assert np.abs(pairs[4][1]).max() > 0


def test_a_first_step_without_a_rate_owes_nothing():
    (_, residual), _ = run(ErrorFeedback(ScaledSign()), gradients_of(2), [0.0, 0.1])
    np.testing.assert_array_equal(residual, 0)


@pytest.mark.parametrize("inner", [ScaledSign(), TopK(0.1)], ids=["sign", "top-k"])
def test_residual_and_wire_agree_on_negative_zero(inner):
    g = np.zeros([1, 51], np.float32)
    g[0, ::2], g[0, 5], g[0, 7] = -0.0, 3.0, -2.0
    ((decoded, residual),) = run(ErrorFeedback(inner), g, [0.1])
    # The payload and the residual add up to the gradient, also for -0.0.
    np.testing.assert_array_equal(decoded + residual, g[0])
    if isinstance(inner, ScaledSign):
        scale = decoded[5]
        assert decoded[0] == scale > 0
        assert decoded[1] == scale


def test_zeros_do_not_drift():
    steps = 100
    g = np.zeros([steps, 51], np.float32)
    g[:, 0] = 1.0
    pairs = run(ErrorFeedback(ScaledSign()), g, [0.1] * steps)
    sent = np.sum([decoded for decoded, _ in pairs], 0, np.float64)
    # All that was sent of the zero gradients is at most what one residual holds.
    assert np.abs(sent[1:30]).max() < 1
    np.testing.assert_allclose(sent[0] + pairs[-1][1][0], steps, rtol=1e-4)


def test_top_k_sends_in_the_end_what_it_held_back():
    steps = 60
    g = np.tile(gradients_of(1), [steps, 1])
    pairs = run(ErrorFeedback(TopK(0.1)), g, [0.1] * steps)
    total = np.sum([decoded for decoded, _ in pairs], 0, np.float64) + pairs[-1][1]
    np.testing.assert_allclose(total, steps * g[0], rtol=1e-4, atol=1e-4)
    assert (np.sum([decoded != 0 for decoded, _ in pairs], 0) > 0).mean() > 0.9
