"""Tests of statistics of blocks in pure TensorFlow against NumPy, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import KINDS, flushed, layouts, same
from tests.ops.implementations import reference as ops
from tfgradcomp.ops.reference.blocks import mean_magnitude


# Two kinds of numbers for each shape, in turns.
@pytest.mark.sample(14)
@pytest.mark.parametrize(
    ("size", "layout", "kind"),
    [
        (*shape, KINDS[(i + j) % 4])
        for i, shape in enumerate(layouts(0, 1, 2, 511, 512, 513, 1000, 6007))
        for j in (0, 1)
    ],
)
def test_statistics(size, layout, kind):
    x, splits = cases.floats(size, kind), cases.row_splits(size, layout)
    statistics = ops.block_statistics(tf.constant(x), splits)
    for name, a, b in zip(
        statistics._fields, statistics, oracle.statistics(x, splits), strict=True
    ):
        same(a, b, name)
        assert not (np.signbit(a) & (a.numpy() == 0)).any()


@pytest.mark.parametrize("layout", ["ragged", "ones", "buckets of 100"])
def test_statistics_of_special_numbers(layout):
    x, splits = cases.floats(1000, "special"), cases.row_splits(1000, layout)
    statistics = ops.block_statistics(tf.constant(x), splits)
    with np.errstate(invalid="ignore"):
        expected = oracle.statistics(flushed(x), splits)
    # Whether the largest magnitude is a denormal or 0 is up to the processor.
    maximum = flushed(statistics.maximum.numpy().astype(np.float32)).astype(np.float64)
    for a, b in zip([maximum, *statistics[1:]], expected, strict=True):
        same(a, b)


@pytest.mark.parametrize("sums", cases.SUMS_ASKED, ids=str)
def test_sums_that_nobody_asks_for_are_zero(sums):
    x, splits = tf.constant(cases.floats(1000)), cases.row_splits(1000, "ragged")
    whole, found = (ops.block_statistics(x, splits, *args) for args in ((), (sums,)))
    for name, a, b in zip(whole._fields, found, whole, strict=True):
        is_asked = name in (*sums, "maximum", "nonfinite")
        same(a, b if is_asked else np.zeros(len(splits) - 1), name)


def test_a_sum_of_another_name_is_refused():
    with pytest.raises(ValueError, match=r"Received: \['l3'\]"):
        ops.block_statistics(tf.ones([4]), (0, 4), ("l1", "l3"))


def test_a_sum_has_the_order_of_the_word_format():
    """Numbers whose sum depends on the order, placed by hand."""
    big = 2.0**60
    x = np.zeros(1024, np.float32)
    x[[0, 8, 16]] = big, 1, -big  # Rows 0 + 1 first: 1 is lost; rows 0 + 2: it is not.
    x[[512, 513, 516]] = big, 1, -big  # Lanes 0 + 4 first: 1 is left.
    total = ops.block_statistics(tf.constant(x), [0, 512, 1024]).sum
    np.testing.assert_array_equal(total, [0, 1])
    # Chunks 0 + 1, then 2: the last chunk of three has no partner.
    x = np.zeros(1536, np.float32)
    x[[0, 512, 1024]] = big, 1, -big
    total = ops.block_statistics(tf.constant(x), [0, 1536]).sum
    np.testing.assert_array_equal(total, [0])
    # Chunks are counted from the start of the vector, pairs from that of the block.
    x[[0, 512, 1024]] = 3, big, 1
    x[1535] = -big
    total = ops.block_statistics(tf.constant(x), [0, 500, 1536]).sum
    np.testing.assert_array_equal(total, [3, 0])


@pytest.mark.parametrize(("size", "layout"), layouts(1, 1000, 6007))
def test_mean_magnitude(size, layout):
    x, splits = cases.floats(size), cases.row_splits(size, layout)
    expected = oracle.block_sum(np.abs(x).astype(np.float64), splits) / np.diff(splits)
    same(mean_magnitude(tf.constant(x), splits), expected.astype(np.float32))
