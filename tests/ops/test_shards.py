"""What a server needs that holds a part of the vector, against NumPy on the whole."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import same
from tests.pairwise import parametrize_pairwise
from tfgradcomp.ops import random_bits

SIZE = 3000


def codes(words, base, count):
    return np.array(oracle.unpack(np.asarray(words), base, count))


# -- Random words -------------------------------------------------------------------


@pytest.mark.sample(10)
@pytest.mark.parametrize("offset", [0, 128, 512, 1920, 2944])
@pytest.mark.parametrize("first", [0, 2**29 - 4])
def test_a_part_draws_what_the_whole_vector_draws_there(ops, offset, first):
    whole = (7, 3, first)
    part = tf.constant([7, 3, first + offset // 128], tf.int64)
    x = cases.floats(SIZE, "zeros")
    rest, left = tf.constant(x[offset:]), SIZE - offset
    drawn = random_bits(part, left)
    np.testing.assert_array_equal(drawn, oracle.stream_bits(SIZE, *whole)[offset:])

    expected = oracle.sign_codes(x, whole)[offset:]
    got = codes(ops.pack_signs(rest, part), 2, left)
    np.testing.assert_array_equal(got, expected)
    words, _, _ = ops.pack_momentum_signs(rest, rest, 0.9, True, part)
    np.testing.assert_array_equal(codes(words, 2, left), expected)

    limit, scale = np.float32([np.inf]), np.float32([3])
    expected = oracle.pack_ternary(x, limit, scale, [0, SIZE], whole)
    got = ops.pack_ternary(rest, limit, scale, [0, left], part)
    np.testing.assert_array_equal(
        codes(got, 3, left), codes(expected, 3, SIZE)[offset:]
    )

    table = np.sort(cases.floats(9))[np.newaxis]
    expected = ops.pack_levels(
        tf.constant(x), table, [0, SIZE], tf.constant(whole, tf.int64)
    )
    got = ops.pack_levels(rest, table, [0, left], part)
    np.testing.assert_array_equal(
        codes(got, 9, left), codes(expected, 9, SIZE)[offset:]
    )

    for base in (2, 3):
        ballots = np.random.default_rng(base).integers(0, base, [4, SIZE])
        sent = np.stack([oracle.pack(row, base) for row in ballots])
        expected = oracle.majority_vote(sent, SIZE, base, 2, 0, whole)
        sent = np.stack([oracle.pack(row[offset:], base) for row in ballots])
        got = ops.majority_vote(tf.constant(sent), left, base, 2, 0, part)
        np.testing.assert_array_equal(
            codes(got, 2, left), codes(expected, 2, SIZE)[offset:]
        )


# -- Sums of codes ------------------------------------------------------------------


@parametrize_pairwise(base=[2, 3], workers=list(range(1, 9)), size=[1, 21, 1000, 4001])
def test_plain_addition_of_recoded_words_adds_the_codes(ops, base, workers, size):
    ballots = np.random.default_rng(size).integers(0, base, [workers, size])
    ballots[:, ::2] = base - 1  # The largest sums: words above 2**31.
    sent = np.stack([oracle.pack(row, base) for row in ballots])
    levels = workers * (base - 1) + 1
    recoded = np.stack(
        [ops.sum_codes(tf.constant(row), base, size, levels) for row in sent[:, None]]
    )
    for row, words in zip(ballots, recoded, strict=True):
        same(words, oracle.pack(row, levels))
    total = recoded[0]
    for row in recoded[1:]:
        total = total + row  # int32, which wraps.
    same(total, oracle.pack(ballots.sum(0), levels))
    same(total, ops.sum_codes(tf.constant(sent), base, size))
    if levels == 9 and size > 20:
        exact = recoded.astype(np.int64).sum(0)
        assert (exact != total).any(), "No sum left int32: this shows nothing."


@pytest.mark.parametrize("sum_base", [6, 17, 256, 257, 65_536, 2**32])
def test_sums_in_a_larger_base(ops, sum_base):
    for base in (2, 3, 4):
        words = cases.words(base, 1, 1000)
        same(
            ops.sum_codes(tf.constant(words), base, 1000, sum_base),
            oracle.sum_codes(words, base, 1000, sum_base),
        )


@pytest.mark.parametrize("sum_base", [-1, 0, 6, 2**32 + 1])
def test_a_base_that_does_not_hold_the_sum_is_refused(ops, sum_base):
    refused = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(refused, match=f"base must be .*Received: .*base={sum_base}"):
        ops.sum_codes(np.zeros([3, 1], np.int32), 3, 5, sum_base)


# -- Error feedback in two halves ---------------------------------------------------


def sent_by(workers, splits, seed=0):
    """Words, scales and a residual; some p are 0."""
    size = splits[-1]
    words = cases.words(2, workers, size, seed)
    scale = cases.positive([workers, len(splits) - 1], seed)
    scale[:, ::2] = 1
    residual = cases.floats(size, seed=seed)
    residual[::3] = 0
    return words, scale, residual


@pytest.mark.sample(19)
@parametrize_pairwise(
    shape=[
        (1, "one"),
        (33, "ones"),
        (1000, "ragged"),
        (6007, "one"),
        (6007, "ragged"),
    ],
    workers=[1, 2, 3, 4],
    moving=[True, False],
)
def test_two_halves_are_the_whole_step(ops, shape, workers, moving):
    size, layout = shape
    splits = cases.row_splits(size, layout)
    words, scales, e = sent_by(workers, splits)
    expected = oracle.mean_sign_error_feedback(words, scales, e, 0.75, moving, splits)
    p = oracle.mean_of_signs(words, scales, splits) + np.float32(0.75) * e
    ratio = tf.constant(0.75)
    signs, l1 = ops.mean_sign_sums(words, scales, e, ratio, splits)
    same(l1, oracle.block_sum(np.abs(p).astype(np.float64), splits), "l1")
    scale = (l1.numpy() / np.diff(splits)).astype(np.float32)
    left = ops.mean_sign_residual(words, scales, e, ratio, moving, signs, scale, splits)
    cases.same_results((signs, scale, left), expected)
    cases.same_results(
        (signs, scale, left),
        ops.mean_sign_error_feedback(words, scales, e, ratio, moving, splits),
    )


def test_the_residual_goes_by_the_words_that_are_given(ops):
    p = np.array([0.0, -0.0, 1.0, -3.0], np.float32)
    words, scale = np.zeros([1, 1], np.int32), np.zeros([1, 1], np.float32)
    ratio = tf.constant(1.0)
    left = ops.mean_sign_residual(
        words, scale, p, ratio, True, np.int32([0b0110]), np.float32([2]), [0, 4]
    )
    np.testing.assert_array_equal(left, [2, -2, -1, -1])


def nodes_of(begin, end):
    """Nodes (level, index) of a block's tree that make its chunks [begin, end)."""
    nodes = []
    while begin < end:
        level = 0
        while begin % 2 ** (level + 1) == 0 and begin + 2 ** (level + 1) <= end:
            level += 1
        nodes.append((level, begin >> level))
        begin += 2**level
    return nodes


def root_of(nodes, chunks):
    """The sum over a block of that many chunks from the sums of its nodes."""
    nodes, level = dict(nodes), 0
    while chunks > 1 << level:
        for index in range(0, -(-chunks >> level), 2):
            left, right = nodes.get((level, index)), nodes.get((level, index + 1))
            if left is None:
                assert right is None  # Both belong to a larger node.
            else:
                nodes[level + 1, index // 2] = left if right is None else left + right
        level += 1
    return nodes[level, 0]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 5120, 9728, 12800, 20_000],
        [0, 512, 1024, 8192, 16_384, 20_000],
        [0, 19_968, 20_000],
        [*range(0, 20_000, 1536), 20_000],
    ],
)
def test_blocks_that_reach_into_several_parts(ops, bounds):
    splits, workers = [0, 300, 5000, 5001, 5130, 17_000, 20_000], 3
    words, scales, e = sent_by(workers, splits)
    ratio = tf.constant(0.75)
    expected = oracle.mean_sign_error_feedback(words, scales, e, 0.75, True, splits)

    parts, sums = [], [{} for _ in splits[1:]]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        assert start % 512 == 0
        ends, block_of = [0], []
        for b, (begin, end) in enumerate(zip(splits[:-1], splits[1:], strict=True)):
            low, high = max(begin, start), min(end, stop)
            if low >= high:
                continue
            first = begin // 512
            for node in nodes_of(low // 512 - first, (high - 1) // 512 + 1 - first):
                last = first + ((node[1] + 1) << node[0])
                ends.append(min(512 * last, high) - start)
                block_of.append((b, node))
        blocks = [b for b, _ in block_of]
        arguments = (
            words[:, start // 32 : -(-stop // 32)],
            scales[:, blocks],
            e[start:stop],
            ratio,
        )
        signs, l1 = ops.mean_sign_sums(*arguments, ends)
        for (b, node), value in zip(block_of, l1.numpy(), strict=True):
            sums[b][node] = value
        parts.append((arguments, signs, blocks, ends))

    chunks = [
        (end - 1) // 512 - begin // 512 + 1
        for begin, end in zip(splits[:-1], splits[1:], strict=True)
    ]
    l1 = np.array([root_of(s, n) for s, n in zip(sums, chunks, strict=True)])
    scale = (l1 / np.diff(splits)).astype(np.float32)
    p = oracle.mean_of_signs(words, scales, splits) + np.float32(0.75) * e
    same(l1, oracle.block_sum(np.abs(p).astype(np.float64), splits))
    left = [
        ops.mean_sign_residual(*arguments, True, signs, scale[blocks], ends)
        for arguments, signs, blocks, ends in parts
    ]
    signs = np.concatenate([signs for _, signs, _, _ in parts])
    cases.same_results((signs, scale, np.concatenate(left)), expected)
