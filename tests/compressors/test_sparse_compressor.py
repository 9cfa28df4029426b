"""Variance-based compression, Strom's and the hybrid, by the paper's own figures."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tfgradcomp.compressors import Hybrid, Momentum, Strom, VarianceBased
from tfgradcomp.core import Layout, SplitVector

LAYOUT = Layout.from_sizes([40, 1, 300, 59])


def context(moments=None, rate=0.1):
    return make_context(rate=rate, moments=moments)


def step(compressor, x, moments, state, layout=LAYOUT, rate=0.1):
    """One step; what is decoded, the new state, whether all was finite, and how many
    elements were sent.
    """
    moments = None if moments is None else tf.constant(moments, tf.float32)
    decoded, state, finite, sent = compiled(compressor, layout)(
        tf.constant(x, tf.float32), moments, state, tf.constant(rate)
    )
    return decoded.numpy(), {k: v.numpy() for k, v in state.items()}, finite, sent


@functools.cache
def compiled(compressor, layout):
    @tf.function
    def step(x, moments, state, rate):
        payload, state, finite = compressor.compress(
            x, state, layout, context(moments, rate)
        )
        decoded = tf.convert_to_tensor(compressor.decompress(payload, layout))
        return decoded, state, finite, compressor.elements_sent(payload, layout)

    return step


def gradients(rng, steps=100):
    """Gradients of eight examples a step, sums of which drift from zero or do not."""
    drift = rng.normal(size=LAYOUT.size) * (rng.random(LAYOUT.size) < 0.3)
    for _ in range(steps):
        yield (rng.normal(size=(8, LAYOUT.size)) + drift) / 8


@pytest.mark.parametrize(
    "compressor", [VarianceBased(), Hybrid(0.1), Strom(0.1)], ids=repr
)
def test_steps_that_move_nothing_leave_the_state_alone(compressor):
    g = next(gradients(np.random.default_rng(6)))
    moments = np.square(g).sum(0)
    _, state, *_ = step(compressor, g.sum(0), moments, compressor.init(LAYOUT))
    _, still, *_ = step(compressor, g.sum(0), moments, state, rate=0.0)
    _, moved, *_ = step(compressor, g.sum(0), moments, state)
    for name in state:
        np.testing.assert_array_equal(still[name], state[name])
        assert (moved[name] != state[name]).any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e20])
def test_what_is_not_finite_is_told(bad):
    """Of the gradient, of the moments, and of a moment that overflows."""
    compressor = VarianceBased()
    state, one = compressor.init(LAYOUT), np.ones(LAYOUT.size, np.float32)
    broken = one.copy()
    broken[7] = bad
    assert step(compressor, one, one, state)[2]
    assert step(compressor, broken, one, state)[2] == np.isfinite(bad)
    with np.errstate(over="ignore"):
        assert not step(compressor, one, broken * broken, state)[2]


def test_moments_may_come_in_parts_with_a_gain():
    g = next(gradients(np.random.default_rng(8))).astype(np.float32)
    x, moments = g.sum(0), np.square(g).sum(0)
    for compressor in (VarianceBased(), Hybrid(0.1)):
        state = compressor.init(LAYOUT)
        expected, expected_state, *_ = step(compressor, 2 * x, 4 * moments, state)
        payload, new, finite = compressor.compress(
            SplitVector(tf.split(tf.constant(x), LAYOUT.sizes), 2.0),
            state,
            LAYOUT,
            context(SplitVector(tf.split(tf.constant(moments), LAYOUT.sizes), 4.0)),
        )
        assert finite
        decoded = compressor.decompress(payload, LAYOUT)
        np.testing.assert_array_equal(decoded, expected)
        for name, value in new.items():
            np.testing.assert_array_equal(value, expected_state[name])


@pytest.mark.parametrize("compressor", [VarianceBased(), Hybrid(0.1)])
def test_without_moments_nothing_is_compressed(compressor):
    for one in (compressor, Momentum(compressor)):
        with pytest.raises(ValueError, match="(?s)model.fit.*second_moments=.*squared"):
            one.compress(tf.zeros([400]), one.init(LAYOUT), LAYOUT, context())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: VarianceBased(0.5), "alpha must be 1 or more.*alpha=0.5"),
        (lambda: Hybrid(0.1, float("nan")), "alpha must be 1 or more.*alpha=nan"),
        (lambda: VarianceBased(zeta=1.01), r"zeta must be in \[0, 1\].*zeta=1.01"),
        (lambda: Strom(0.0), "threshold must be positive.*threshold=0.0"),
        (lambda: Hybrid(float("inf")), "threshold must be positive.*threshold=inf"),
        (lambda: Strom(1e39), "finite in float32.*threshold=1e.39"),
        (lambda: Strom(1e-40), "positive.*float32.*threshold=1e-40"),
        (lambda: Strom(1.0, "gaps"), "index_coding must be one of.*delta.*'gaps'"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_vector_that_indices_cannot_reach_is_refused():
    with pytest.raises(ValueError, match=r"less than .* elements.*268435456"):
        size = tf.TensorSpec([2**28], tf.float32)
        layout = Layout.from_sizes([2**28])
        tf.function(
            lambda x, r: Strom(1.0).compress(x, {"residual": r}, layout, context())
        ).get_concrete_function(size, size)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_simplified_criterion_is_that_of_the_variance(alpha):
    """Appendix A: (3) is (1) with alpha' = alpha (B - 1) / (B - alpha)."""
    batch = 16
    g = next(gradients(np.random.default_rng(4))).repeat(2, 0)
    g = g + np.random.default_rng(5).normal(size=g.shape) / 8
    mean, variance = g.mean(0), g.var(0, ddof=1)
    strict = alpha * (batch - 1) / (batch - alpha)
    expected = strict / batch * variance < mean**2
    compressor = VarianceBased(alpha)
    decoded, *_ = step(
        compressor, mean, np.square(g / batch).sum(0), compressor.init(LAYOUT)
    )
    assert 20 < np.count_nonzero(expected) < LAYOUT.size - 20
    # But for what is too small to be sent.
    np.testing.assert_array_equal(decoded != 0, expected & (decoded != 0))
    near = np.abs(mean) > 0.02 * np.abs(mean).max()
    np.testing.assert_array_equal((decoded != 0)[near], expected[near])
