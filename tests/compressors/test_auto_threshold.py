"""The threshold that follows what is owed: one in 32 of the largest |r|, per step."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.compressors.test_sparse_words import LAYOUT, gradients, step
from tfgradcomp.compressors import Hybrid, Strom, auto_threshold
from tfgradcomp.compressors.auto_threshold import find_thresholds
from tfgradcomp.core import SplitVector

LARGEST, NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny


def rule(r, sample=2**12):
    """The largest float32 below the k-th largest of |r|, of a sample of a block."""
    stride = -(-r.size // sample)
    magnitude = np.abs(r[::stride])
    with np.errstate(invalid="ignore"):
        magnitude = magnitude[(magnitude >= NORMAL) & (magnitude <= LARGEST)]
    if not magnitude.size:
        return LARGEST
    k = -(-magnitude.size // 32)
    below = np.nextafter(np.sort(magnitude)[-k], np.float32(0))
    return max(below, NORMAL)


def rule_of(r, splits, sample=2**12):
    """The rule for each block, `[num_blocks]`."""
    return np.array(
        [rule(r[block], sample) for block in reference.blocks(splits)], np.float32
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
    owed = np.where(np.arange(r.size) % 3 > 0, r, 0).astype(np.float32)
    x = np.where(np.arange(r.size) % 3 > 0, 0, r).astype(np.float32)
    found = find_thresholds(tf.constant(x), tf.constant(owed), [0, r.size]).numpy()
    assert found.dtype == np.float32 and found.tolist() == [rule(r)]
    if np.any(np.abs(r) > NORMAL):
        # Somebody passes, and all that are equal do.
        assert 0 < np.count_nonzero(np.abs(r) > found)


@pytest.mark.parametrize("sample", [400, 100, 7])
@pytest.mark.parametrize("varies", [False, True])
def test_each_block_has_its_own_of_an_evenly_spaced_sample(sample, varies, monkeypatch):
    monkeypatch.setattr(auto_threshold, "SAMPLE", sample)
    rng = np.random.default_rng(sample)
    x, owed = rng.normal(size=(2, 400)).astype(np.float32)
    x[:40] *= 100
    parts = SplitVector(tf.split(tf.constant(x), LAYOUT.sizes), 0.5)
    splits = tf.constant(LAYOUT.row_splits, tf.int64) if varies else LAYOUT.row_splits
    found = find_thresholds(parts, tf.constant(owed), splits).numpy()
    r = np.float32(0.5) * x + owed
    np.testing.assert_array_equal(found, rule_of(r, LAYOUT.row_splits, sample))
    assert (found != rule_of(r, LAYOUT.row_splits)).any() == (sample < 300)


@pytest.mark.parametrize("kind", [Strom, Hybrid])
def test_sent_and_owed_add_up_and_no_element_outgrows_the_threshold(kind):
    compressor = kind("auto", index_coding="delta")
    state, r, v, shares, ratios = compressor.init(LAYOUT), 0.0, 0.0, [], []
    for g in gradients(np.random.default_rng(1)):
        total = g.sum(0).astype(np.float32)
        moments = np.square(g).sum(0) if kind is Hybrid else None
        r = (r + total).astype(np.float32)
        splits = LAYOUT.row_splits
        threshold = reference.spread(rule_of(r, splits), splits).astype(np.float32)
        where = np.abs(r) > threshold
        if kind is Hybrid:
            v = v + moments
            where &= r * r > 2 * v
            lower = v - 2 * np.abs(r) * threshold + threshold**2
            v = 0.999 * np.where(where, np.maximum(lower, 0), v)
        decoded, state, finite, count = step(compressor, total, moments, state)
        assert finite and count == np.count_nonzero(where)
        np.testing.assert_array_equal(decoded, np.sign(r) * threshold * where)
        shares.append(where.mean())
        ratios += [*(np.abs(r) / threshold)[where]]
        r = r - decoded
        np.testing.assert_array_equal(state["residual"], r)
        if kind is Hybrid:
            np.testing.assert_allclose(state["variance"], v, rtol=1e-4, atol=1e-6)
    # 2 of 40, 1 of 1, 10 of 300 and 2 of 59.
    assert max(shares) == 15 / 400 and np.mean(shares) > 0.01
    # A fixed threshold of the first step's size is outgrown many times here.
    assert max(ratios) < 2


def outgrown(compressor):
    """|r| over the threshold of all that is sent, and of what is due at the end."""
    state, ratios = compressor.init(LAYOUT), []
    for g in gradients(np.random.default_rng(1)):
        total = g.sum(0).astype(np.float32)
        r = state["residual"] + total
        decoded, state, *_ = step(compressor, total, np.square(g).sum(0), state)
        sent = decoded != 0
        ratios += [*np.abs(r[sent] / decoded[sent])]
    return np.array(ratios), compressor.arrears(state)


def test_what_outgrows_a_number_does_not_outgrow_the_quantile():
    """The hybrid holds an element back until r is far beyond a low threshold."""
    ratios, arrears = outgrown(Hybrid(0.01))
    assert np.median(ratios) > 16 and np.median(arrears) > 16
    ratios, arrears = outgrown(Hybrid("auto"))
    assert max(ratios) < 2 and not arrears.size
