"""QSGD: even levels up to the norm of a block, which may be 0 or infinite."""

import numpy as np
import pytest

from tests import reference
from tests.compressors.test_orq import compress
from tfgradcomp.compressors import QSGD

SPLITS = [0, 100, 101, 165, 168]


def gradient(seed=0):
    x = np.random.default_rng(seed).normal(size=168).astype(np.float32)
    x[[3, 120]] = 0.0, -0.0
    return x


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [3, 5, 7, 9, 257])
def test_levels_are_even_up_to_the_norm(levels, norm):
    x = gradient()
    payload, table, vector, _ = compress(QSGD(levels, norm), x, SPLITS, seed=4, rank=2)
    assert payload["norm"].shape == [4]
    for block, own in zip(reference.blocks(SPLITS), table, strict=True):
        expected = reference.even_levels(x[block], levels, norm)
        np.testing.assert_allclose(own, expected, rtol=2e-7, atol=1e-12)
        assert own[levels // 2] == 0
        assert (own == -own[::-1]).all()
    coins = reference.uniform(len(x), 4, 0, 2)
    expected = reference.quantize(
        x, SPLITS, lambda v: reference.even_levels(v, levels, norm), coins
    )
    np.testing.assert_allclose(vector, expected, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_zeros_stay_zeros(norm):
    for block in (np.zeros(20), np.full(7, -0.0), np.full(5, 1e-42)):
        _, table, vector, finite = compress(QSGD(9, norm), block, [0, len(block)])
        np.testing.assert_array_equal(vector, 0)
        np.testing.assert_array_equal(table, 0)
        assert finite


def test_a_norm_beyond_float32_is_not_finite():
    x = np.full(50, 3e38)
    assert compress(QSGD(5, "max"), x, [0, 50])[-1]
    assert not compress(QSGD(5, "l2"), x, [0, 50])[-1]
