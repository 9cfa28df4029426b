"""Top-k: the elements of largest magnitude, with their positions."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp.compressors import TopK
from tfgradcomp.core import Layout

LAYOUT = Layout.from_sizes([30, 1, 20])


def test_top_k_is_that_of_the_reference():
    for ratio, count in ((0.01, 1), (0.1, 6), (0.5, 26), (1.0, 51)):
        compressor = TopK(ratio)
        x = np.random.default_rng(3).normal(size=51).astype(np.float32)
        compressed = compressor.compress(tf.constant(x), (), LAYOUT, make_context())
        vector = compressor.decompress(compressed.payload, LAYOUT).numpy()
        assert np.count_nonzero(vector) == count
        np.testing.assert_array_equal(vector, reference.top_k(x, ratio))


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.1, float("nan")])
def test_a_ratio_out_of_range_raises(ratio):
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        TopK(ratio)
