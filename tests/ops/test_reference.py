"""The pure-TensorFlow operations against NumPy: every bit that the format fixes."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import STREAMS, same
from tfgradcomp.ops import reference as ops
from tfgradcomp.ops.word_format import NOTHING

SIZES = (0, 1, 2, 20, 33, 65, 513, 1000, 6007)
KINDS = ("normal", "zeros", "huge", "tiny")
TINY = np.float32(2.0**-126)


def tensor(stream):
    return tf.constant(np.array(stream, np.uint64).view(np.int64))


def flushed(x):
    """Denormals as TensorFlow's arithmetic on a CPU takes them."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def layouts(*sizes):
    return [
        (size, layout)
        for size in sizes
        for layout in cases.LAYOUTS
        if layout == "one" or 1 < size < (6000 if layout == "ones" else size + 1)
    ]


# -- Random words -------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream", [(0, 0, 0), *STREAMS, (2**64 - 1, 2**64 - 1, 2**63 - 1000)]
)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 1000])
def test_random_words_are_philox(stream, count):
    same(ops.random_bits(tensor(stream), count), oracle.stream_bits(count, *stream))


def test_uniform_numbers_are_the_top_24_bits():
    u = ops.uniform(tensor(STREAMS[1]), 1000)
    bits = oracle.stream_bits(1000, *STREAMS[1])
    same(u, ((bits >> 8) * 2.0**-24).astype(np.float32))
    assert 0 <= u.numpy().min() < 0.01
    assert 0.99 < u.numpy().max() < 1


# -- Codes --------------------------------------------------------------------------


@pytest.mark.parametrize("base", cases.BASES)
@pytest.mark.parametrize("size", cases.SIZES)
def test_codes_and_words(base, size):
    codes = cases.codes(base, size)
    words = ops.pack_codes(tf.constant(codes), base)
    same(words, oracle.pack(codes.view(np.uint32), base))
    same(ops.unpack_codes(words, base, size), codes)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256])
def test_one_plus_among_others_at_every_position(base):
    digits = oracle.digits_per_word(base)
    for hot in range(2 * digits + 1):
        codes = np.zeros(2 * digits + 1, np.int32)
        codes[hot] = base - 1
        words = ops.pack_codes(tf.constant(codes), base).numpy().view(np.uint32)
        expected = np.zeros(3, np.uint64)
        expected[hot // digits] = (base - 1) * base ** (hot % digits)
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("base", [2, 3, 9, 300, 2**32])
def test_unpacking_keeps_leading_axes(base):
    words = cases.words(base, 6, 37).reshape(2, 3, -1)
    codes = [[oracle.unpack(row, base, 37) for row in part] for part in words]
    same(
        ops.unpack_codes(tf.constant(words), base, 37),
        np.array(codes, np.uint64).astype(np.uint32).view(np.int32),
    )


@pytest.mark.parametrize("base", [2, 3, 5, 17, 257])
@pytest.mark.parametrize("workers", cases.WORKERS)
@pytest.mark.parametrize("size", [0, 1, 21, 1000])
def test_sums_of_codes(base, workers, size):
    words = cases.words(base, workers, size)
    same(
        ops.sum_codes(tf.constant(words), base, size),
        oracle.sum_codes(words, base, size),
    )


def test_the_largest_codes_add_up_in_the_largest_base():
    words = np.full([1, 3], 2**32 - 1, np.uint32).view(np.int32)
    same(ops.sum_codes(tf.constant(words), 2**32, 3), words[0])
    words = np.full([3, 3], (2**32 - 1) // 3, np.uint32).view(np.int32)
    total = np.full([3], 2**32 - 1, np.uint32).view(np.int32)
    same(ops.sum_codes(tf.constant(words), (2**32 - 1) // 3 + 1, 3), total)


# -- Signs --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "zeros", "special"])
@pytest.mark.parametrize("size", SIZES)
def test_signs(kind, size):
    x = cases.floats(size, kind)
    same(ops.pack_signs(tf.constant(x)), oracle.pack_signs(x))
    for stream in STREAMS:
        words = ops.pack_signs(tf.constant(x), tensor(stream))
        same(words, oracle.pack_signs(x, stream))


def test_the_sign_of_every_special_number():
    # 0, -0, NaN, -NaN, Inf, -Inf, four denormals, six finite ones, 1, -1, 1/2, -3.
    codes = ops.unpack_codes(ops.pack_signs(tf.constant(cases.SPECIAL)), 2, 20)
    np.testing.assert_array_equal(
        codes, [1, 1] + 2 * [1, 0] + [1, 0, 1, 0] + 5 * [1, 0]
    )


@pytest.mark.parametrize("hot", [0, 1, 31, 32, 63, 64, 512, 999])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_sign_among_its_opposites(hot, sign):
    x = np.full(1000, -sign, np.float32)
    x[hot] = sign
    words = ops.pack_signs(tf.constant(x)).numpy().view(np.uint32)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:1000]
    np.testing.assert_array_equal(np.flatnonzero(bits == (sign > 0)), [hot])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warming_up", [False, True])
def test_signs_of_a_moving_average(kind, warming_up):
    for size in SIZES:
        x, m = cases.floats(size, kind), cases.floats(size, "zeros", seed=1)
        words, m_new, nonfinite = ops.pack_momentum_signs(
            tf.constant(x),
            tf.constant(m),
            0.9,
            tf.constant(warming_up),
            tensor((7, 3, 0)),
        )
        expected = oracle.pack_momentum_signs(x, m, 0.9, warming_up, (7, 3, 0))
        same(words, expected[0])
        same(m_new, expected[1])


# -- Ternary ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 21, 1000, 6007))
def test_ternary(kind, size, layout):
    x, splits = cases.floats(size, kind), cases.row_splits(size, layout)
    rng = np.random.default_rng(size)
    scale = np.array([np.abs(x[b]).max() for b in oracle.blocks(splits)], np.float32)
    limit = np.where(rng.random(len(scale)) < 0.5, np.inf, scale * np.float32(0.7))
    limit = limit.astype(np.float32)
    scale = np.minimum(scale, limit)
    for stream in STREAMS:
        words = ops.pack_ternary(
            tf.constant(x),
            tf.constant(limit),
            tf.constant(scale),
            splits,
            tensor(stream),
        )
        same(words, oracle.pack_ternary(x, limit, scale, splits, stream))


def test_ternary_of_special_numbers():
    x = flushed(np.tile(cases.SPECIAL, 50))
    splits = [0, 300, 700, 1000]
    limit = np.array([np.inf, 1.0, np.inf], np.float32)
    for scale in (1.0, np.inf, np.nan, 0.0):
        scale = np.full(3, scale, np.float32)
        words = ops.pack_ternary(
            tf.constant(x),
            tf.constant(limit),
            tf.constant(scale),
            splits,
            tensor((7, 3, 0)),
        )
        with np.errstate(invalid="ignore"):
            same(words, oracle.pack_ternary(x, limit, scale, splits, (7, 3, 0)))


def test_zeros_are_never_kept_and_the_largest_always():
    x = np.array([0.0, -0.0, 3.0, -3.0] * 25, np.float32)
    for high in range(20):
        words = ops.pack_ternary(
            tf.constant(x),
            tf.constant([np.inf]),
            tf.constant([3.0]),
            [0, 100],
            tensor((5, high, 0)),
        )
        np.testing.assert_array_equal(
            ops.unpack_codes(words, 3, 100), [1, 1, 2, 0] * 25
        )


@pytest.mark.parametrize("limit", [math.inf, 0.6])
def test_ternary_rounding_is_unbiased(limit):
    """The mean over many draws is the clipped x: a z-test an element."""
    x = np.linspace(-1, 1, 41, dtype=np.float32)
    draws, s = 4000, min(1.0, limit)
    tiled = np.tile(x, draws)
    words = ops.pack_ternary(
        tf.constant(tiled),
        tf.constant([limit]),
        tf.constant([s]),
        [0, tiled.size],
        tensor((11, 5, 0)),
    )
    rounded = ops.unpack_codes(words, 3, tiled.size).numpy() - 1
    mean = s * rounded.reshape(draws, -1).mean(0)
    clipped = np.clip(x, -limit, limit)
    p = np.abs(clipped) / s
    deviation = s * np.sqrt(p * (1 - p) / draws)
    assert (np.abs(mean - clipped) <= 4.5 * deviation + 1e-7).all()


# -- Statistics ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "layout"), layouts(0, 1, 2, 511, 512, 513, 1000, 6007)
)
def test_statistics(kind, size, layout):
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
    same(ops.mean_magnitude(tf.constant(x), splits), expected.astype(np.float32))


# -- Decoding -----------------------------------------------------------------------


@pytest.mark.parametrize("base", [2, 3, 5, 9, 17, 257])
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 21, 1000))
def test_levels(base, size, layout):
    splits = cases.row_splits(size, layout)
    scale = cases.positive(len(splits) - 1)
    for workers in (1, 3):
        words = cases.words(base, workers, size)
        zero = workers * (base - 1)
        values = ops.sum_levels(
            tf.constant(words), tf.constant(scale), splits, base, 2, zero
        )
        same(values, oracle.sum_levels(words, scale, splits, base, 2, zero))


@pytest.mark.parametrize("workers", cases.WORKERS)
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 33, 1000))
def test_means_of_signs(workers, size, layout):
    splits = cases.row_splits(size, layout)
    words = cases.words(2, workers, size)
    scale = cases.positive([workers, len(splits) - 1])
    # A sum that shows the order in which workers are added.
    scale[::2] *= np.float32(1e6)
    if scale.size:
        scale[0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        expected = oracle.mean_of_signs(words, scale, splits)
    same(ops.mean_of_signs(tf.constant(words), tf.constant(scale), splits), expected)


# -- Votes --------------------------------------------------------------------------


@pytest.mark.parametrize("base", [2, 3])
@pytest.mark.parametrize("reply_base", [2, 3])
@pytest.mark.parametrize("workers", cases.WORKERS)
def test_votes(base, reply_base, workers):
    for size in (0, 1, 33, 1000):
        words = cases.words(base, workers, size)
        for quorum in (0, 1, 2, workers, workers + 1):
            for stream in (None, *STREAMS):
                reply = ops.majority_vote(
                    tf.constant(words),
                    size,
                    base,
                    reply_base,
                    quorum,
                    None if stream is None else tensor(stream),
                )
                expected = oracle.majority_vote(
                    words, size, base, reply_base, quorum, stream
                )
                same(reply, expected, (size, quorum, stream))


def test_votes_by_hand():
    minus, none, plus = 0, 1, 2
    ballots = [[plus, plus, minus, none, none], [plus, minus, minus, none, plus]]
    words = tf.stack([ops.pack_codes(tf.constant(b), 3) for b in ballots])

    def vote(reply_base, quorum=0, stream=None):
        reply = ops.majority_vote(words, 5, 3, reply_base, quorum, stream)
        return ops.unpack_codes(reply, reply_base, 5).numpy().tolist()

    assert vote(3) == [plus, none, minus, none, plus]
    assert vote(3, quorum=2) == [plus, none, minus, none, none]
    # One bit cannot say "none": a split vote is a minus.
    assert vote(2) == [1, 0, 0, 0, 1]
    coins = oracle.stream_bits(5, 7, 3, 0) & 1
    assert vote(2, stream=tensor((7, 3, 0))) == [1, coins[1], 0, coins[3], 1]
    # A coin is no net vote: the quorum takes it back.
    assert vote(3, 1, tensor((7, 3, 0))) == [plus, none, minus, none, plus]


# -- Error feedback -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 33, 1000, 6007))
def test_sign_error_feedback(kind, moving, momentum, size, layout):
    splits = cases.row_splits(size, layout)
    x, e = cases.floats(size, kind), cases.floats(size, kind, seed=1)
    m = cases.floats(size, kind, seed=2) if momentum else None
    if kind == "huge":
        # Away from infinity.
        x, e, m = x / 8, e / 8, None if m is None else m / 8
    if kind == "tiny":
        # Of one sign, so that no p is denormal, whose sign a processor may drop.
        e, m = np.copysign(e, x), None if m is None else np.copysign(m, x)
    ratio = np.float32(0.75)
    results = ops.sign_error_feedback(
        tf.constant(x),
        None if m is None else tf.constant(m),
        tf.constant(e),
        0.9,
        tf.constant(ratio),
        tf.constant(moving),
        splits,
    )
    expected = oracle.sign_error_feedback(x, m, e, 0.9, ratio, moving, splits)
    results, expected = [
        [*values[:3], flushed(np.asarray(values[3]))] for values in (results, expected)
    ]
    for name, a, b in zip(
        ("words", "scale", "momentum", "residual"), results, expected, strict=True
    ):
        if b is None:
            assert a is None
        else:
            same(a, b, name)


def test_a_zero_counts_as_plus_in_error_feedback():
    p = np.array([0.0, -0.0, 1.0, -3.0], np.float32)
    words, scale, _, left = ops.sign_error_feedback(
        tf.constant(p), None, tf.zeros(4), 0.0, 1.0, True, [0, 4]
    )
    np.testing.assert_array_equal(ops.unpack_codes(words, 2, 4), [1, 1, 1, 0])
    np.testing.assert_array_equal(scale, [1])
    np.testing.assert_array_equal(left, [-1, -1, 0, -2])


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 33, 1000))
def test_mean_sign_error_feedback(moving, workers, size, layout):
    splits = cases.row_splits(size, layout)
    words = cases.words(2, workers, size)
    scale = cases.positive([workers, len(splits) - 1])
    e = cases.floats(size, seed=1)
    results = ops.mean_sign_error_feedback(
        words, scale, e, tf.constant(1.5), tf.constant(moving), splits
    )
    expected = oracle.mean_sign_error_feedback(words, scale, e, 1.5, moving, splits)
    for a, b in zip(results, expected, strict=True):
        same(a, b)


# -- Inside functions ---------------------------------------------------------------


def everything(x, m, words, signs, scale, scales, codes, stream, flag, ratio, splits):
    """All operations on one set of arguments, as a flat list of results."""
    size = splits[-1]
    levels = scales[:, :, tf.newaxis] * [-1.0, 0.1, 1.0]
    return [
        ops.pack_codes(codes, 5),
        ops.unpack_codes(words, 3, size),
        ops.pack_signs(x, stream),
        *ops.pack_momentum_signs(x, m, 0.9, flag, stream),
        ops.pack_ternary(x, scale, scale, splits, stream),
        *ops.block_statistics(x, splits),
        *ops.find_levels(x, splits, "optimal", 9, 1),
        *ops.find_levels(x, splits, "quantiles", 9),
        *ops.find_levels(x, splits, "symmetric", 2),
        *ops.find_levels(x, splits, "means", 3),
        ops.sum_codes(words, 3, size),
        # Sums that a caller goes on with.
        ops.sum_levels(words, scale, splits, 3, 2, 6) + x,
        x + ops.mean_of_signs(signs, scales, splits),
        ops.mean_of_signs(signs, scales, splits),
        ops.pack_levels(x, levels[0], splits, stream),
        ops.mean_of_levels(words, levels, splits),
        ops.mean_of_sparse(words & 0x700001FF, scales, splits),
        ops.majority_vote(words, size, 3, 3, 1, stream),
        *ops.sign_error_feedback(x, m, m, 0.9, ratio, flag, splits),
        *ops.mean_sign_error_feedback(signs, scales, m, ratio, flag, splits),
        *ops.mean_sign_sums(signs, scales, m, ratio, splits),
        ops.mean_sign_residual(signs, scales, m, ratio, flag, signs[0], scale, splits),
        *sparse(x + m, x * m, m, splits),
    ]


def sparse(total, product, m, splits):
    """What has no static shape, of a sum and a product that a caller hands in."""
    v = abs(product)
    packed = ops.pack_unambiguous(total, v, m, m * m, 1.5, 0.999, splits)
    more = ops.pack_over_threshold(total, v, m, m * m, 0.5, 1.5, 0.999)
    return [*packed, *more, m + packed[2], 0.5 * more[2]]


@pytest.mark.parametrize(
    ("workers", "jit_compile"), [(3, False), (5, False), (9, False), (3, True)]
)
def test_the_same_bits_inside_functions(workers, jit_compile):
    # TensorFlow rewrites what it puts into a graph: x / 3 into x * (1 / 3), sums of
    # sums into one.
    size = 1000
    splits = cases.row_splits(size, "ragged")
    blocks = len(splits) - 1
    arguments = [
        tf.constant(value)
        for value in (
            cases.floats(size, "zeros"),
            cases.floats(size, seed=1),
            cases.words(3, workers, size),
            cases.words(2, workers, size),
            cases.positive(blocks),
            cases.positive([workers, blocks]),
            cases.codes(5, size),
            np.array([7, 3, 2**32 - 100]),
            True,
            np.float32(0.75),
        )
    ]
    expected = everything(*arguments, splits)
    compiled = tf.function(everything, jit_compile=jit_compile)
    for i, (a, b) in enumerate(
        zip(compiled(*arguments, splits), expected, strict=True)
    ):
        if jit_compile and b.dtype.is_floating:
            # XLA may contract a multiplication and an addition.
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        elif a.shape != b.shape:
            # Inside XLA there is a word for each element, most of them for nothing.
            assert jit_compile and a.shape == [size], i
            same(a[a != NOTHING], b, i)
        else:
            same(a, b, i)
