"""TernGrad's clipping, and the blocks on which a naive one goes wrong."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp.compressors import Clip, Identity
from tfgradcomp.core import Layout

pytestmark = pytest.mark.python_ops


def clip(x, sizes=None, factor=2.5):
    layout = Layout.from_sizes(sizes or [len(x)])
    compressed = Clip(Identity(), factor).compress(
        tf.constant(x, tf.float32), (), layout, make_context()
    )
    return compressed.payload["values"].numpy()


def test_blocks_are_clipped_at_a_multiple_of_their_own_deviation():
    rng = np.random.default_rng(0)
    sizes = [1000, 500, 7]
    x = np.concatenate(
        [rng.normal(size=1000), 100 * rng.laplace(size=500), rng.normal(3, 1, size=7)]
    )
    splits = [0, 1000, 1500, 1507]
    for factor in (0.5, 1.0, 2.5):
        clipped = clip(x, sizes, factor)
        np.testing.assert_allclose(
            clipped, reference.clip(x, splits, factor), rtol=1e-5
        )
    # At 2.5 deviations most elements are as they were, and some are not.
    changed = np.mean(clip(x, sizes) != x.astype(np.float32))
    assert 0.005 < changed < 0.05


def test_gaussian_gradients_change_as_in_the_paper():
    # Wen et al., Section 3.2: length by 1.0 to 1.5 %, direction by 2 to 3 degrees.
    x = np.random.default_rng(1).normal(size=200_000)
    clipped = clip(x).astype(np.float64)
    lost = 1 - np.linalg.norm(clipped) / np.linalg.norm(x)
    assert 0.010 < lost < 0.015
    cosine = clipped @ x / np.linalg.norm(clipped) / np.linalg.norm(x)
    assert 2 < np.degrees(np.arccos(cosine)) < 3


@pytest.mark.parametrize("value", [3.0, -1e-3, 1e30, -1e-30, 1e-20])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_constant_block_is_not_clipped(value, size):
    x = np.full(size, value, np.float32)
    np.testing.assert_array_equal(clip(x), x)


def test_a_mean_far_above_the_deviation_is_not_clipped_away():
    x = 100 + np.random.default_rng(2).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(clip(x), x)


@pytest.mark.parametrize("size", [1, 3])
def test_blocks_of_one_element_are_never_clipped(size):
    x = np.array([5.0, -1e-9, 1e20], np.float32)[:size]
    np.testing.assert_array_equal(clip(x, [1] * size, factor=0.01), x)


@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_lost(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    x = rng.normal(rng.choice([0, 1, 100]), 10.0 ** rng.integers(-8, 3), size=size)
    x[rng.random(size) < 0.5] = 0
    x[rng.integers(size)] = 10.0 ** rng.integers(-20, 20)
    clipped = clip(x)
    # Elements keep their sign and none becomes zero, so that all are expected back.
    np.testing.assert_array_equal(np.sign(clipped), np.sign(x))
    assert (np.abs(clipped) <= np.abs(x.astype(np.float32))).all()
    # A block keeps at least a 40th of its root mean square.
    assert np.linalg.norm(clipped) > np.linalg.norm(x) / 40


def test_zeros_stay_zeros():
    np.testing.assert_array_equal(clip(np.zeros(5)), 0)
