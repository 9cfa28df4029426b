"""Thresholds that follow the residual: a quantile, or the greatest reduction."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.compressors.test_sparse_compressor import LAYOUT, gradients, step
from tfgradcomp.compressors import Hybrid, auto_threshold
from tfgradcomp.compressors.auto_threshold import find_thresholds
from tfgradcomp.core import SplitVector

LARGEST, NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny


def rule(r, sample=2**12, v=None):
    """The largest float32 below the k-th largest of |r|, of a sample of a block.

    With second moments v, and an alpha of 2, ambiguous elements do not count, and k is
    the one of the first quarter with which the signs leave least of the squares.
    """
    stride = -(-r.size // sample)
    magnitude = np.abs(r[::stride])
    with np.errstate(invalid="ignore", over="ignore"):
        counts = (magnitude >= NORMAL) & (magnitude <= LARGEST)
        if v is not None:
            counts &= magnitude**2 > 2 * v[::stride]
    most, magnitude = -(-magnitude.size // 4), np.sort(magnitude[counts])[::-1]
    if not magnitude.size:
        return LARGEST
    k = -(-magnitude.size // 32)
    if v is not None:
        exact = magnitude.astype(np.float64)
        left = [
            np.square(exact[:n] - exact[n - 1]).sum() + np.square(exact[n:]).sum()
            for n in range(1, min(most, exact.size) + 1)
        ]
        k = 1 + np.argmin(left)
    below = np.nextafter(magnitude[k - 1], np.float32(0))
    return max(below, NORMAL)


def rule_of(r, splits, sample=2**12, v=None):
    """The rule for each block, `[num_blocks]`."""
    return np.array(
        [
            rule(r[block], sample, None if v is None else v[block])
            for block in reference.blocks(splits)
        ],
        np.float32,
    )


def cases():
    normal = np.random.default_rng(0).normal(size=400).astype(np.float32)
    few = np.zeros(400, np.float32)
    few[[3, 90, 200]] = 2.0, -5.0, 0.25
    broken = normal.copy()
    broken[:40] = np.resize(np.float32([np.inf, np.nan, -np.inf]), 40)
    yield "normal", normal
    yield "one element", np.float32([-3.0])
    yield "zeros", np.zeros(400, np.float32)
    yield "denormals", np.full(400, 1e-40, np.float32)
    yield "least normal", np.full(400, NORMAL)
    yield "constant", np.full(400, -0.37, np.float32)
    yield "few", few
    yield "tiny", normal * np.float32(1e-36)
    yield "huge", normal * np.float32(5e37)
    yield "not finite", broken


CASES = [*cases()]


@pytest.mark.parametrize(("name", "r"), CASES, ids=[name for name, _ in CASES])
def test_it_is_the_quantile_of_what_is_owed(name, r):
    residual = np.where(np.arange(r.size) % 3 > 0, r, 0).astype(np.float32)
    x = np.where(np.arange(r.size) % 3 > 0, 0, r).astype(np.float32)
    found = find_thresholds(tf.constant(x), tf.constant(residual), [0, r.size]).numpy()
    assert found.dtype == np.float32 and found.tolist() == [rule(r)]
    if np.any(np.abs(r) > NORMAL):
        # Somebody passes, and all that are equal do.
        assert 0 < np.count_nonzero(np.abs(r) > found)


@pytest.mark.parametrize(("name", "r"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.parametrize("ambiguous", [0, 0.5, 1])
def test_its_signs_take_most_of_what_is_unambiguous(name, r, ambiguous):
    rng = np.random.default_rng(2)
    v = np.where(rng.random(r.size) < ambiguous, 1e38, 0).astype(np.float32)
    moments, variance = np.float32([[0.25], [0.75]]) * v
    splits = [0, r.size]
    found = find_thresholds(
        tf.constant(r), tf.zeros(r.size), splits, tf.constant(moments), variance, 2.0
    )
    np.testing.assert_array_equal(found, rule_of(r, splits, v=moments + variance))


@pytest.mark.parametrize("sample", [400, 100, 7])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("sizes", [LAYOUT.sizes, np.diff(LAYOUT.row_splits), [0, 400]])
def test_each_block_has_its_own_of_an_evenly_spaced_sample(
    sample, varies, sizes, monkeypatch
):
    monkeypatch.setattr(auto_threshold, "SAMPLE", sample)
    rng = np.random.default_rng(sample)
    x, residual = rng.normal(size=(2, 400)).astype(np.float32)
    x[:40] *= 100
    parts = SplitVector(tf.split(tf.constant(x), sizes), 0.5)
    splits = tf.constant(LAYOUT.row_splits, tf.int64) if varies else LAYOUT.row_splits
    found = find_thresholds(parts, tf.constant(residual), splits).numpy()
    r = np.float32(0.5) * x + residual
    np.testing.assert_array_equal(found, rule_of(r, LAYOUT.row_splits, sample))
    assert (found != rule_of(r, LAYOUT.row_splits)).any() == (sample < 300)


def outgrown(compressor):
    """|r| over the threshold of all that is sent, and of what is due at the end."""
    state, ratios = compressor.init(LAYOUT), []
    for g in gradients(np.random.default_rng(1)):
        total = g.sum(0).astype(np.float32)
        r = state["residual"] + total
        decoded, state, *_ = step(compressor, total, np.square(g).sum(0), state)
        sent = decoded != 0
        ratios += [*np.abs(r[sent] / decoded[sent])]
    return np.array(ratios), compressor.overdue_residuals(state)


def test_what_outgrows_a_number_does_not_outgrow_one_that_follows():
    """The hybrid holds an element back until r is far beyond a low threshold."""
    ratios, overdue_residuals = outgrown(Hybrid(0.01))
    assert np.median(ratios) > 16 and np.median(overdue_residuals) > 16
    ratios, overdue_residuals = outgrown(Hybrid("auto"))
    assert np.quantile(ratios, 0.9) < 4 and not overdue_residuals.size
