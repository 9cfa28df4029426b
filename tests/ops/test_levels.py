"""Levels of blocks, found, rounded to and averaged, against exact sums in Python."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import same
from tests.ops.implementations import native, needs_library
from tests.pairwise import parametrize_pairwise

STREAM = (7, 3, 2**32 - 100)
SHAPES = [(1, "one"), (2, "ones"), (65, "ones"), (300, "one"), (1000, "ragged")]
SHAPES += [(6007, "buckets of 100")]


def blocks_of(x, splits):
    return [x[block] + np.float32(0) for block in oracle.blocks(splits)]


def means(v):
    """The means of both sides of the mean, and the mean between them."""
    q, unit = oracle.fixed(v)

    def mean(chosen):
        # To float64 and on to float32, as the sum and its quotient are rounded.
        value = float(sum(chosen)) / len(chosen) * float(unit)
        return np.float32(0 if abs(value) < 2.0**-126 else value)

    middle = mean(q)
    low = [n for n, e in zip(q, v, strict=True) if e < middle]
    high = [n for n, e in zip(q, v, strict=True) if not e < middle]
    return np.array([mean(low or q), middle, mean(high or q)])


RULES = {
    "optimal": (oracle.optimal_levels, [(2, 0), (3, 0), (9, 0), (9, 3), (33, 1)]),
    "quantiles": (oracle.quantile_levels, [(2,), (7,), (9,)]),
    "symmetric": (oracle.symmetric_levels, [()]),
    "means": (means, [()]),
}


def vectors(size):
    """Ordinary numbers, many equal ones, many orders of magnitude, one alone."""
    x = cases.floats(size)
    yield x
    yield np.round(x)
    yield np.exp(12 * x) * np.sign(np.roll(x, 1))
    yield np.full(size, -2.5, np.float32)
    yield np.clip(x, -3, 3) * np.float32(1.1e38)
    yield np.sign(x) * np.float32(2.0**-126) * (1 + np.abs(x))
    yield x * np.float32(2.0**-130)
    yield np.sign(x)


# The number of levels, where the rule does not ask for it.
COUNTS = {"symmetric": 2, "means": 3}


@functools.cache
def exact_levels(rule, size, layout):
    """Vectors and their levels, once for both kinds of operations."""
    levels_of, settings = RULES[rule]
    splits = cases.row_splits(size, layout)
    return [
        (x, setting or (COUNTS[rule],), np.float32(levels) + np.float32(0))
        for x in vectors(size)
        for setting in settings
        for levels in [[levels_of(v, *setting) for v in blocks_of(x, splits)]]
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "layout"), SHAPES)
def test_levels_are_those_of_exact_sums(ops, rule, size, layout):
    splits = cases.row_splits(size, layout)
    for x, setting, expected in exact_levels(rule, size, layout):
        levels, nonfinite = ops.find_levels(tf.constant(x), splits, rule, *setting)
        same(levels, expected, (rule, *setting))
        assert nonfinite == 0 and nonfinite.dtype == tf.int64


def test_the_middle_of_three_levels_makes_the_least_error(ops):
    for seed in range(20):
        x = np.random.default_rng(seed).integers(-50, 50, 30).astype(np.float32)
        levels = ops.find_levels(tf.constant(x), [0, 30], "optimal", 3)[0].numpy()[0]

        def error(middle, x=x):
            table = np.array([x.min(), middle, x.max()])
            k = (middle <= x).astype(int)
            return np.sum((x - table[k]) * (table[k + 1] - x))

        assert error(levels[1]) == min(error(element) for element in x)


@pytest.mark.parametrize("largest", [2e-39, 1.0])
def test_a_denormal_is_a_level_but_adds_nothing(ops, largest):
    x = np.array([1e-40, -1e-41, 0, -0.0, 3e-45, -2e-45, largest, -0.0], np.float32)
    ordered = np.sort(x + np.float32(0))
    one = float(largest == 1)
    for rule, count, expected in (
        ("optimal", 3, [-1e-41, one or 2e-39, largest]),
        ("quantiles", 8, ordered),
        ("symmetric", 2, [0, 0]),
        ("means", 3, [0, one / 8, one]),
    ):
        levels, nonfinite = ops.find_levels(tf.constant(x), [0, 8], rule, count)
        # Bits: a comparison of numbers might take denormals for zeros.
        same(levels.numpy().view(np.int32), np.float32([expected]).view(np.int32), rule)
        assert nonfinite == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_is_not_finite_has_levels_0(ops, rule):
    x = cases.floats(1000)
    splits = cases.row_splits(1000, "buckets of 100")
    (count, *_) = RULES[rule][1][0] or (COUNTS[rule],)
    finite = ops.find_levels(tf.constant(x), splits, rule, count)[0].numpy()
    x[[105, 107, 999]] = np.inf, np.nan, -np.inf
    levels, nonfinite = ops.find_levels(tf.constant(x), splits, rule, count)
    finite[[1, 9]] = 0
    same(levels, finite)
    assert nonfinite == 3


def level_codes(x, table, splits, stream=None):
    """k, and k + 1 where u (b_{k+1} - b_k) < x - b_k."""
    codes = []
    u = oracle.stream_uniform(len(x), *(stream or STREAM))
    for levels, block in zip(table, oracle.blocks(splits), strict=True):
        for value, coin in zip(x[block], u[block], strict=True):
            k = int(sum(level <= value for level in levels[1:-1]))
            if stream is not None:
                width = np.float32(levels[k + 1] - levels[k])
                k += int(np.float32(coin) * width < value - levels[k])
            codes.append(k)
    return np.array(codes)


def tables(*shape):
    rng = np.random.default_rng(shape)
    return np.sort(rng.normal(size=shape), -1).astype(np.float32)


@pytest.mark.sample(35)
@pytest.mark.parametrize("count", [2, 3, 9, 16, 17, 40])
@pytest.mark.parametrize(("size", "layout"), SHAPES)
def test_rounding_to_levels(ops, count, size, layout):
    splits = cases.row_splits(size, layout)
    x, table = cases.floats(size), tables(len(splits) - 1, count)
    table[0] = table[0, 0]
    # Elements that are a level, and some beyond the ends.
    x[::3] = np.repeat(table[:, count // 2], np.diff(splits))[::3]
    x[::7] *= 100
    stream = cases.tensor(STREAM)
    expected = oracle.pack(level_codes(x, table, splits, STREAM), count)
    same(ops.pack_levels(x, table, splits, stream), expected)
    if count > 2:
        expected = oracle.pack(level_codes(x, table, splits), count - 1)
        same(ops.pack_levels(x, table, splits), expected)


@pytest.mark.parametrize("count", [2, 3, 9, 16, 17, 129, 257, 259])
def test_rounding_to_even_levels_beside_every_threshold(ops, count):
    size = 6000
    rng, u = np.random.default_rng(count), oracle.stream_uniform(size, *STREAM)
    splits = [0, 2001, 2300, 4000, size]
    # From float32's range to levels that are nearly even.
    norms = np.array([1, 2e-31, 2.5e30, 0.3], np.float32)[:, np.newaxis]
    table = norms * np.linspace(-1, 1, count, dtype=np.float32)
    table[0] += np.float32(100)
    table[3, count // 2] += table[3, -1] * np.float32(1e-6)
    own = np.repeat(table, np.diff(splits), axis=0)
    k = rng.integers(0, count - 1, size)
    low, high = own[np.arange(size), k], own[np.arange(size), k + 1]
    # u (b_{k+1} - b_k) + b_k, or a number beside it.
    x = np.float32(u) * (high - low) + low
    steps = rng.integers(-3, 4, size)
    x = np.where(steps < -1, np.nextafter(x, -np.inf, dtype=np.float32), x)
    x = np.where(steps > 1, np.nextafter(x, np.inf, dtype=np.float32), x)
    x[::9], x[4::9] = high[::9], np.nextafter(low, -np.inf)[4::9]
    x[5::90], x[6::90], x[7::90], x[8::90] = np.inf, -np.inf, 2 * high[7::90], np.nan
    stream = cases.tensor(STREAM)
    expected = oracle.pack(level_codes(x, table, splits, STREAM), count)
    same(ops.pack_levels(x, table, splits, stream), expected)


@parametrize_pairwise(shape=SHAPES, workers=[1, 3, 4], count=[2, 3, 9, 16, 17, 300])
def test_the_mean_of_levels(ops, shape, workers, count):
    size, layout = shape
    splits = cases.row_splits(size, layout)
    words = cases.words(count, workers, size)
    table = tables(workers, len(splits) - 1, count)
    # A sum that shows the order in which workers are added.
    table[::2] *= np.float32(1e6)
    block = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
    total = np.float32(0)
    for row, levels in zip(words, table, strict=True):
        total = total + levels[block, oracle.unpack(row, count, size)]
    expected = total / np.float32(workers)
    same(ops.mean_of_levels(tf.constant(words), table, splits), expected)


@needs_library
def test_words_that_no_codes_make_are_no_fault():
    for count in (2, 3, 9, 17, 300, 2**16):
        digits = oracle.digits_per_word(count)
        words = np.full([2, 3], -1, np.int32)
        table = np.ones([2, 1, count], np.float32)
        values = native.mean_of_levels(words, table, [0, 3 * digits])
        np.testing.assert_array_equal(values, np.ones(3 * digits))
