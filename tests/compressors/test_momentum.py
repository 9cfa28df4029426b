"""Momentum on the worker: Signum's moving average and Nesterov's."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tfgradcomp.compressors import Identity, Momentum, NesterovMomentum, Sign
from tfgradcomp.compressors.momentum import warmup_steps_for
from tfgradcomp.core import Layout


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


def test_automatic_warm_up_is_the_least_that_the_paper_allows():
    assert warmup_steps_for(0.9) == 54
    for beta in (0.0, 0.3, 0.5, 0.8, 0.95, 0.99):
        # C / 2 b^C <= 1 / (1 - b^2) / (C + 1), from C on.
        c = np.arange(1, 10_000)
        fails = c / 2 * beta**c > 1 / (1 - beta**2) / (c + 1)
        assert warmup_steps_for(beta) == 1 + max(c[fails], default=0)


def test_nesterov_momentum_is_undamped():
    layout, compressor = Layout.from_sizes([50]), NesterovMomentum(Identity(), 0.75)
    rng, state, m = np.random.default_rng(6), compressor.init(layout), np.zeros(50)
    for step in range(6):
        x = rng.normal(size=50)
        m = 0.75 * m + x
        payload, state, _ = compressor.compress(
            tf.constant(x, tf.float32), state, layout, make_context(step=step)
        )
        sent = compressor.decompress(payload, layout)
        np.testing.assert_allclose(sent, 0.75 * m + x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state["momentum"], m, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Momentum, NesterovMomentum])
@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_out_of_range_raises(kind, momentum):
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        kind(Identity(), momentum)
