"""BinGrad: two levels a block, by the conditions of the paper."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.compressors.test_orq import blocks_of, compress, every_kind
from tests.helpers import make_context
from tfgradcomp.compressors import BinGrad, ScaledSign
from tfgradcomp.core import Layout
from tfgradcomp.ops import unpack_codes

SIZES = [100, 1, 64, 3]
SPLITS = [0, 100, 101, 165, 168]


def gradient(seed=0):
    x = np.random.default_rng(seed).normal(0.3, 1, size=168).astype(np.float32)
    x[[3, 120]] = 0.0, -0.0
    return x


@every_kind
def test_b_has_the_means_of_both_sides_of_the_mean(kind):
    for v in blocks_of(kind)[:5] + np.float32(0.25):
        payload, ((low, high),), vector, _ = compress(BinGrad(), v, [0, len(v)])
        above = v >= v.astype(np.float64).mean()
        # Eq. 17, but for b_0, which is the mean of the block.
        np.testing.assert_allclose(low, v[~above].astype(np.float64).mean(), rtol=1e-6)
        np.testing.assert_allclose(high, v[above].astype(np.float64).mean(), rtol=1e-6)
        np.testing.assert_array_equal(unpack_codes(payload["codes"], 2, len(v)), above)
        np.testing.assert_array_equal(vector, np.where(above, high, low))


@every_kind
def test_pb_solves_its_condition(kind):
    for v in blocks_of(kind)[:5]:
        _, ((low, high),), _, _ = compress(BinGrad("pb"), v, [0, len(v)])
        assert low == -high
        a = np.abs(v.astype(np.float64))
        # Eq. 15: no element comes nearer.
        distance = [abs(len(a) * b - a[a >= b].sum()) for b in a]
        assert high == np.abs(v)[np.argmin(distance)]
        np.testing.assert_allclose(
            high * len(a), a[a >= high].sum(), rtol=0.02, atol=0.02 * a.sum()
        )


@pytest.mark.parametrize("variant", ["b", "pb"])
def test_values_are_those_of_the_reference(variant):
    x = gradient()
    for step, rank in ((0, 0), (17, 3)):
        _, _, vector, _ = compress(
            BinGrad(variant), x, SPLITS, seed=6, step=step, rank=rank
        )
        expected = reference.bingrad_b(x, SPLITS)
        if variant == "pb":
            coins = reference.uniform(len(x), 6, step, rank)
            expected = reference.quantize(x, SPLITS, reference.symmetric_levels, coins)
        np.testing.assert_allclose(vector, expected, rtol=1e-6, atol=1e-7)


def test_pb_saturates_outside_and_is_unbiased_inside():
    x = np.append(np.linspace(-0.5, 0.5, 199), 40.0).astype(np.float32)
    draws = np.array(
        [compress(BinGrad("pb"), x, [0, 200], step=step)[2] for step in range(400)]
    )
    b = np.abs(draws).max()
    assert b < 40 and set(np.abs(draws).ravel()) == {b}
    assert (draws[:, -1] == b).all()
    inside = np.abs(x) < b
    assert inside.sum() > 100
    deviation = np.sqrt((b - x[inside].astype(np.float64)) * (b + x[inside]) / 400)
    z = (draws.mean(0) - x)[inside] / deviation
    assert np.abs(z).max() < 5


def vector_of(kind, count):
    """Returns the first blocks of a kind as one vector, and their ends."""
    rows = blocks_of(kind)[:count]
    return rows.reshape(-1), np.arange(len(rows) + 1) * rows.shape[1]


@every_kind
def test_b_has_less_error_than_the_scaled_sign_and_pb(kind):
    x, splits = vector_of(kind, 20)

    def error(compressor):
        return np.sum((decoded(compressor, x, splits) - x) ** 2, dtype=np.float64)

    assert error(BinGrad()) < error(ScaledSign())
    assert error(BinGrad()) < error(BinGrad("pb"))
    # Where the mean is not zero, by much.
    x = x + np.float32(2.0)
    assert error(BinGrad()) < 0.9 * error(ScaledSign())


@pytest.mark.parametrize("lloyd_steps", [1, 4])
def test_lloyd_steps_are_those_of_the_reference(lloyd_steps):
    x = gradient() + np.random.default_rng(1).standard_t(2, 168).astype(np.float32)
    expected = reference.bingrad_b(x, SPLITS, lloyd_steps)
    vector = decoded(BinGrad(lloyd_steps=lloyd_steps), x, SPLITS)
    np.testing.assert_allclose(vector, expected, rtol=1e-6, atol=1e-7)


@every_kind
def test_lloyd_steps_leave_less_error_than_the_scaled_sign_in_more_blocks(kind):
    x, splits = vector_of(kind, 60)

    def errors(compressor):
        error = (decoded(compressor, x, splits) - x).astype(np.float64) ** 2
        return error.reshape(len(splits) - 1, -1).sum(1)

    before, *after = (errors(BinGrad(lloyd_steps=n)) for n in (0, 1, 2, 8))
    for later in after:
        # Float32 levels: a block that is at rest may get a rounding more.
        assert (later <= before * (1 + 1e-6)).all()
        before = later
    worse = [(errors(BinGrad(lloyd_steps=n)) > errors(ScaledSign())) for n in (0, 8)]
    assert worse[1].sum() <= worse[0].sum()
    assert worse[1].mean() < 0.1


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
