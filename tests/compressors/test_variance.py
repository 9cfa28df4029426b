"""Variance-based compression, by the figures of the paper."""

import numpy as np
import pytest

from tests import reference
from tests.compressors.test_sparse_compressor import CODINGS, LAYOUT, gradients, step
from tfgradcomp.compressors import VarianceBased
from tfgradcomp.core import Layout


@CODINGS
def test_the_example_of_the_paper(coding):
    """Appendix B: 0.04 is not sent, the others as powers of two."""
    layout = Layout.from_sizes([5])
    compressor = VarianceBased(1.5, 0.5, coding)
    x = [0.04, 0.31, -6.25, 22.25, -35.75]
    decoded, state, finite, sent = step(
        compressor, x, 0.0001 * np.square(x), compressor.init(layout), layout
    )
    np.testing.assert_array_equal(decoded, [0, 0.25, -8, 16, -32])
    assert finite and sent == 4
    np.testing.assert_array_equal(state["residual"], np.float32([0.04, 0, 0, 0, 0]))
    np.testing.assert_allclose(state["variance"], [0.04**2 * 0.00005, 0, 0, 0, 0], 1e-6)


@CODINGS
def test_each_element_is_wholly_kept_or_wholly_sent(coding):
    compressor = VarianceBased(1.5, 0.9, coding)
    state, r, v, steps_with = compressor.init(LAYOUT), 0.0, 0.0, 0
    for g in gradients(np.random.default_rng(2)):
        r = np.float32(r + g.sum(0).astype(np.float32))
        v = np.float32(v + np.square(g).sum(0).astype(np.float32))
        decoded, state, _, count = step(
            compressor, g.sum(0), np.square(g).sum(0), state
        )
        selected = r.astype(np.float64) ** 2 > 1.5 * v.astype(np.float64)
        top = reference.spread(
            reference.largest(np.where(selected, r, 0), LAYOUT.row_splits),
            LAYOUT.row_splits,
        )
        sent = decoded != 0
        assert not (sent & ~selected).any() and count == np.count_nonzero(sent)
        # The nearer power of two; never above that of the block's largest.
        with np.errstate(divide="ignore", invalid="ignore"):
            highest = 2.0 ** np.floor(np.log2(top))
            low = 2.0 ** np.floor(np.log2(np.abs(r)))
            near = np.where(np.abs(r) - low < 2 * low - np.abs(r), low, 2 * low)
            expected = np.sign(r) * np.minimum(near, highest)
        expected = np.where(selected & (np.abs(expected) * 128 >= highest), expected, 0)
        np.testing.assert_array_equal(decoded, expected)
        r, v = np.where(sent, 0, r), np.where(sent, 0, np.float32(0.9) * v)
        np.testing.assert_array_equal(state["residual"], r)
        np.testing.assert_allclose(state["variance"], v, rtol=1e-6)
        steps_with += sent.any() and not sent.all()
    assert steps_with > 50


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
