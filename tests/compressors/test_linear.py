"""Linear quantization: levels at evenly spaced quantiles."""

import numpy as np
import pytest

from tests import reference
from tests.compressors.test_orq import blocks_of, compress, every_kind
from tests.compressors.test_qsgd import SPLITS, gradient
from tfgradcomp.compressors import LinearQuantization


@pytest.mark.parametrize("levels", [2, 3, 4, 9, 100, 257])
def test_linear_levels_are_quantiles(levels):
    x = gradient()
    _, table, vector, _ = compress(
        LinearQuantization(levels), x, SPLITS, seed=5, step=3
    )
    for block, own in zip(reference.blocks(SPLITS), table, strict=True):
        np.testing.assert_array_equal(own, reference.quantile_levels(x[block], levels))
    coins = reference.uniform(len(x), 5, 3, 0)
    expected = reference.quantize(
        x, SPLITS, lambda v: reference.quantile_levels(v, levels), coins
    )
    np.testing.assert_array_equal(vector, expected)


@every_kind
def test_linear_levels_are_used_equally_often(kind):
    v = blocks_of(kind)[:4].reshape(-1)
    _, (table,), vector, _ = compress(LinearQuantization(9), v, [0, len(v)])
    used = np.array([np.mean(vector == level) for level in table])
    # The inner ones: half of the elements on either side of a level go to it.
    assert (np.abs(used[1:-1] - 1 / 8) < 0.06).all()
