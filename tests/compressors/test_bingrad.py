"""BinGrad: blocks at the borders, and levels of half precision."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.test_orq import compress
from tests.helpers import make_context
from tfgradcomp.compressors import BinGrad
from tfgradcomp.core import Layout

SPLITS = [0, 100, 101, 165, 168]


def gradient(seed=0):
    x = np.random.default_rng(seed).normal(0.3, 1, size=168).astype(np.float32)
    x[[3, 120]] = 0.0, -0.0
    return x


@pytest.mark.parametrize("block", [[1e-40, -1e-40, 1e-39], [2.0] * 5, [3e38, -3e38]])
def test_lloyd_steps_divide_by_nothing(block):
    x = np.array(block, np.float32)
    vector = decoded(BinGrad(lloyd_steps=3), x, [0, len(x)])
    np.testing.assert_allclose(vector, x, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(
    "arguments", [("b", "float32", -1), ("b", "float32", 0.5), ("pb", "float32", 2)]
)
def test_lloyd_steps_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="lloyd_steps.*Received: "):
        BinGrad(*arguments)


def decoded(compressor, x, splits):
    layout = Layout(tuple(int(split) for split in splits))
    compressed = compressor.compress(tf.constant(x), (), layout, make_context())
    return compressor.decompress(compressed.payload, layout).numpy()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "block",
    [
        np.array([0.5]),
        np.array([-3.0]),
        np.full(20, -3.0),
        np.zeros(20),
        np.array([-1.5, 2.0, 2.0]),
        np.repeat([-1.0, 5.0], 7),
    ],
    ids=["one", "negative", "constant", "zeros", "two", "two values"],
)
def test_b_keeps_blocks_of_two_values(dtype, block):
    _, _, vector, finite = compress(BinGrad("b", dtype), block, [0, len(block)])
    np.testing.assert_array_equal(vector, block)
    assert finite


def test_pb_keeps_what_has_one_magnitude():
    for block in ([0.5], [-3.0], [0.0, -0.0], [2.0, -2.0, 2.0, 2.0]):
        _, _, vector, _ = compress(BinGrad("pb"), np.array(block), [0, len(block)])
        np.testing.assert_array_equal(vector, block)


@pytest.mark.parametrize("variant", ["b", "pb"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_levels_are_rounded_to_nearest(variant, dtype):
    kind = tf.as_dtype(dtype).as_numpy_dtype
    x = gradient()
    exact = compress(BinGrad(variant), x, SPLITS)[1]
    table = compress(BinGrad(variant, dtype), x, SPLITS)[1]
    assert (table != exact).any()
    np.testing.assert_array_equal(table, exact.astype(kind).astype(np.float32))


def test_a_level_beyond_float16_is_not_finite():
    for variant in ("b", "pb"):
        x = np.array([-8e4, 8e4])
        assert not compress(BinGrad(variant, "float16"), x, [0, 2])[-1]
        assert compress(BinGrad(variant, "bfloat16"), x, [0, 2])[-1]
