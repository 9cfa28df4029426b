"""The operations in pure TensorFlow: what the native ones must equal, bit for bit.

They run wherever TensorFlow does, inside XLA too. Vectors are flat; a gradient x may be
`Parts` of one. Blocks are given by `row_splits`: block b is the range
`[row_splits[b], row_splits[b + 1])`, none is empty.
A random `stream` is int64 `[key, high, first]`: word j is lane j mod 4 of the
Philox-4x32-10 block whose key is `key` and whose counter has the low 64 bits
first + j // 4 and the high 64 bits `high` (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011). With `first` = o / 4, for a multiple o of 4, the elements of a
vector from o on draw what they draw in the whole vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.ops.parts import Parts
from tfgradcomp.ops.word_format import digits_per_word, words_for

# Inside functions TensorFlow adds up a sum of sums, (a + b) + c, in an order of its
# own. Where the order counts, that of workers or of terms, a - (-b) stands for a + b:
# the same bits, and nothing that TensorFlow rearranges.

# The order of a sum over a block; custom_ops/word_format.h says the same.
_CHUNK, _LANES = 512, 8


class Statistics(NamedTuple):
    """Statistics of blocks, float64 `[num_blocks]` each.

    Attributes:
        maximum: The largest magnitude.
        l1: The sum of magnitudes.
        sum_of_squares: The sum of squares.
        sum: The sum.
        nonfinite: The number of elements that are infinite or NaN.
    """

    maximum: tf.Tensor
    l1: tf.Tensor
    sum_of_squares: tf.Tensor
    sum: tf.Tensor
    nonfinite: tf.Tensor


def random_bits(stream: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the first `count` words of a random stream, uint32."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count],
        key=tf.bitcast(stream[:1], tf.uint64),
        counter=tf.bitcast(tf.gather(stream, [2, 1]), tf.uint64),
        alg=1,
        dtype=tf.uint32,
    )


def uniform(stream: tf.Tensor, count: int) -> tf.Tensor:
    """Returns float32 numbers in [0, 1): the top 24 of the `random_bits`."""
    bits = tf.bitwise.right_shift(random_bits(stream, count), tf.constant(8, tf.uint32))
    return tf.cast(bits, tf.float32) * 2.0**-24


def pack_codes(codes: tf.Tensor, base: int) -> tf.Tensor:
    """Packs integer codes in `[0, base)`, shape `[count]`, into int32 words."""
    digits = digits_per_word(base)
    count = codes.shape[0]
    rows = words_for(count, base)
    padded = tf.pad(tf.cast(codes, tf.uint32), [[0, rows * digits - count]])
    table = tf.reshape(padded, [rows, digits])
    return tf.bitcast(tf.reduce_sum(table * _powers(base), axis=1), tf.int32)


def unpack_codes(words: tf.Tensor, base: int, count: int) -> tf.Tensor:
    """Unpacks int32 words, shape `[..., words]`, into int32 codes `[..., count]`."""
    column = tf.bitcast(words, tf.uint32)[..., tf.newaxis]
    if base == 2:
        shifts = tf.range(32, dtype=tf.int32)
        table = tf.bitwise.right_shift(column, tf.cast(shifts, tf.uint32)) & 1
    else:
        table = column // _powers(base)
        if base < 2**32:
            table = table % tf.constant(base, tf.uint32)
    shape = [*words.shape[:-1], words.shape[-1] * digits_per_word(base)]
    return tf.cast(tf.reshape(table, shape)[..., :count], tf.int32)


def pack_signs(x: tf.Tensor | Parts, stream: tf.Tensor | None = None) -> tf.Tensor:
    """Packs the signs of float32 `[count]` into base-2 words, code 1 for plus.

    Args:
        x: The vector. A NaN has the sign of its sign bit.
        stream: Random stream whose words' lowest bits are the codes of exact zeros
            (either zero); without it they count as plus.
    """
    return pack_signs_checked(x, stream)[0]


def pack_signs_checked(x: tf.Tensor | Parts, stream: tf.Tensor | None = None):
    """Packs signs as `pack_signs` does.

    Returns:
        The words and the number of elements of `x` that are infinite or NaN (int64).
    """
    x = tf.convert_to_tensor(x)
    # The bits are compared, not the numbers: a processor may take denormals for zeros.
    bits = tf.bitcast(x, tf.int32)
    zero = tf.equal(bits & 0x7FFFFFFF, 0)
    codes = tf.cast(bits >= 0, tf.int32)
    at_zero = 1
    if stream is not None:
        at_zero = tf.cast(random_bits(stream, x.shape[0]) & 1, tf.int32)
    return pack_codes(tf.where(zero, at_zero, codes), 2), _count_nonfinite(x)


def pack_momentum_signs(
    x: tf.Tensor | Parts,
    momentum: tf.Tensor,
    beta: float,
    warming_up: tf.Tensor | bool,
    stream: tf.Tensor,
):
    """Packs the signs of the moving average m = beta m + (1 - beta) x.

    Args:
        x: float32 `[count]`.
        momentum: m, float32 `[count]`.
        beta: Its coefficient.
        warming_up: Boolean scalar: whether the signs of `x` are packed instead.
        stream: As in `pack_signs`.

    Returns:
        The words, the new m and the number of its elements that are infinite or NaN
        (int64): where x is, m is, too.
    """
    x = tf.convert_to_tensor(x)
    m = beta * momentum + (1 - beta) * x
    words = pack_signs(tf.where(warming_up, x, m), stream)
    return words, m, _count_nonfinite(m)


def pack_ternary(
    x: tf.Tensor | Parts,
    limit: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor,
) -> tf.Tensor:
    """Rounds to -s, 0, s at random and packs the signs plus one into base-3 words.

    Element j is kept where u_j s < min(|x_j|, limit), u_j the uniform numbers of the
    stream: with probability min(|x_j|, limit) / s.

    Args:
        x: float32 `[count]`.
        limit: What magnitudes are clipped to, float32 `[num_blocks]`.
        scale: s, not less than the largest magnitude left, float32 `[num_blocks]`.
        row_splits: The blocks.
        stream: The random stream.
    """
    x = tf.convert_to_tensor(x)
    magnitude, most = tf.abs(x), spread(limit, row_splits)
    magnitude = tf.where(most < magnitude, most, magnitude)
    threshold = uniform(stream, x.shape[0]) * spread(scale, row_splits)
    sign = tf.where(tf.bitcast(x, tf.int32) < 0, -1, 1)
    return pack_codes(tf.where(threshold < magnitude, sign, 0) + 1, 3)


def block_statistics(x: tf.Tensor | Parts, row_splits: Sequence[int]) -> Statistics:
    """Returns statistics of each block of float32 `[count]`, in float64.

    Sums are taken in an order that depends on the blocks alone.
    """
    x = tf.convert_to_tensor(x)
    finite_bits = 0x7F800000
    magnitude_bits = tf.bitcast(x, tf.int32) & 0x7FFFFFFF
    wide = tf.cast(x, tf.float64)
    # Bits of magnitudes have the order of the magnitudes, NaN above all.
    maximum = _reduce_blocks(magnitude_bits, row_splits, tf.maximum)
    count = tf.cast(magnitude_bits >= finite_bits, tf.int32)
    return Statistics(
        tf.cast(tf.bitcast(maximum, tf.float32), tf.float64),
        _reduce_blocks(tf.abs(wide), row_splits, tf.add),
        _reduce_blocks(wide * wide, row_splits, tf.add),
        _reduce_blocks(wide, row_splits, tf.add) + 0.0,
        tf.cast(_reduce_blocks(count, row_splits, tf.add), tf.float64),
    )


def sum_codes(
    words: tf.Tensor, base: int, count: int, sum_base: int | None = None
) -> tf.Tensor:
    """Adds up the codes of N workers.

    Words of one `sum_base` that holds the largest total can be added on, as plain int32
    numbers that wrap: digits add up without a carry. So the codes of one worker,
    written in the base of the sum of all, are added by an ordinary all-reduce.

    Args:
        words: int32 `[N, words]`, of codes in `[0, base)`.
        base: Their base.
        count: Codes of a worker.
        sum_base: Base of the result, at least N * (base - 1) + 1, its default.

    Returns:
        The words of the sums.

    Raises:
        ValueError: If `sum_base` is too small or above 2**32.
    """
    least = words.shape[0] * (base - 1) + 1
    if sum_base is None:
        sum_base = least
    elif sum_base < least:
        raise ValueError(
            f"sum_base must be at least N * (base - 1) + 1 = {least} for N = "
            f"{words.shape[0]} workers. Received: sum_base={sum_base}"
        )
    total = tf.reduce_sum(unpack_codes(words, base, count), axis=0)
    return pack_codes(total, sum_base)


def sum_levels(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    base: int,
    step: int,
    zero: int,
    addend: tf.Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """Decodes evenly spaced levels: scale * (step * sum_i code_i - zero), + addend.

    Args:
        words: int32 `[N, words]`, the codes of N workers.
        scale: float32 `[num_blocks]`.
        row_splits: The blocks.
        base: Base of the codes.
        step: Integer between two levels, in units of the scale.
        zero: Integer that counts as 0.
        addend: float32 `[count]` or None.
        sizes: Elements of each of the parts that are returned, or None for no parts.

    Returns:
        float32 `[count]`, or `Parts` of it, flat tensors.
    """
    total = tf.reduce_sum(unpack_codes(words, base, row_splits[-1]), axis=0)
    levels = tf.cast(step * total - zero, tf.float32)
    if addend is None:
        return _in_parts(spread(scale, row_splits) * levels, sizes)
    return _in_parts(addend - spread(-scale, row_splits) * levels, sizes)


def mean_of_signs(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """Returns the mean of N vectors of scaled signs, added in the order of workers.

    Args:
        words: int32 `[N, words]`, base 2.
        scale: float32 `[N, num_blocks]`.
        row_splits: The blocks.
        sizes: As in `sum_levels`.

    Returns:
        float32 `[count]`, or `Parts` of it.
    """
    total = None
    for signs, s in zip(tf.unstack(words), tf.unstack(scale), strict=True):
        s = spread(s, row_splits)
        plus = unpack_codes(signs, 2, row_splits[-1]) > 0
        if total is None:
            total = tf.where(plus, s, -s)
        else:
            total -= tf.where(plus, -s, s)
    return _in_parts(_divide(total, words.shape[0]), sizes)


def majority_vote(
    words: tf.Tensor,
    count: int,
    base: int,
    reply_base: int,
    quorum: int = 0,
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """Takes the vote of N workers' signs.

    Args:
        words: int32 `[N, words]`. Base 2: code 1 for plus; base 3: codes 0, 1, 2 for
            minus, an abstention, plus.
        count: Codes of a worker.
        base: 2 or 3.
        reply_base: 3: codes 0, 1, 2 for minus, no change, plus. 2: code 1 for plus;
            a split vote counts as minus.
        quorum: With base-3 replies, fewer net votes than this count as none.
        stream: Random stream whose words' lowest bits decide split votes, 1 for plus.

    Returns:
        The words of the reply.
    """
    num_workers = words.shape[0]
    total = tf.reduce_sum(unpack_codes(words, base, count), axis=0)
    net = 2 * total - num_workers if base == 2 else total - num_workers
    votes = tf.sign(net)
    if stream is not None:
        coin = tf.cast(random_bits(stream, count) & 1, tf.int32)
        votes = tf.where(tf.equal(net, 0), 2 * coin - 1, votes)
    if reply_base == 2:
        return pack_codes((votes + 1) // 2, 2)
    return pack_codes(tf.where(tf.abs(net) < quorum, 0, votes) + 1, 3)


def sign_error_feedback(
    x: tf.Tensor | Parts,
    momentum: tf.Tensor | None,
    residual: tf.Tensor,
    mu: float,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """Error feedback with scaled signs: p = mu m' + x + ratio e, m' = mu m + x.

    Args:
        x: float32 `[count]`.
        momentum: m, float32 `[count]`, or None: p = x + ratio e.
        residual: e, float32 `[count]`.
        mu: Coefficient of the momentum.
        ratio: float32 scalar.
        moving: Boolean scalar; where it is false the residual stays.
        row_splits: The blocks.

    Returns:
        The base-2 words of the signs of p (a zero counts as plus), the mean |p| of
        each block (float32 `[num_blocks]`), the new m (or None) and the new residual.
    """
    x = p = tf.convert_to_tensor(x)
    if momentum is not None:
        momentum = mu * momentum + x
        p = mu * momentum + x
    p -= -ratio * residual
    scale = mean_magnitude(p, row_splits)
    words = pack_signs(p)
    left = p - mean_of_signs(words[tf.newaxis], scale[tf.newaxis], row_splits)
    return words, scale, momentum, tf.where(moving, left, residual)


def mean_sign_error_feedback(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """`sign_error_feedback` of the `mean_of_signs` that N workers sent.

    Returns:
        The words, the scale and the new residual.
    """
    x = mean_of_signs(sent_words, sent_scale, row_splits)
    words, scale, _, left = sign_error_feedback(
        x, None, residual, 0.0, ratio, moving, row_splits
    )
    return words, scale, left


def mean_sign_sums(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    row_splits: Sequence[int],
):
    """The first half of `mean_sign_error_feedback`, which has the scale yet to come.

    A server that holds a part of the vector knows a block's scale, the mean |p|, only
    when the sums of the block's parts have met.

    Returns:
        The words of the signs of p and the sum of |p| of each block, float64
        `[num_blocks]`.
    """
    p = mean_of_signs(sent_words, sent_scale, row_splits) - -ratio * residual
    return pack_signs(p), _sum_of_magnitudes(p, row_splits)


def mean_sign_residual(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
) -> tf.Tensor:
    """The second half of `mean_sign_error_feedback`: what is left of p.

    Args:
        sent_words: As in the first half.
        sent_scale: As in the first half.
        residual: As in the first half.
        ratio: As in the first half.
        moving: Boolean scalar; where it is false the residual stays.
        words: What the first half returned.
        scale: float32 `[num_blocks]`.
        row_splits: The blocks.

    Returns:
        The new residual, p less the scaled signs.
    """
    p = mean_of_signs(sent_words, sent_scale, row_splits) - -ratio * residual
    left = p - mean_of_signs(words[tf.newaxis], scale[tf.newaxis], row_splits)
    return tf.where(moving, left, residual)


def mean_magnitude(x: tf.Tensor | Parts, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the mean |x| of each block, float32 `[num_blocks]`."""
    mean = _divide(_sum_of_magnitudes(x, row_splits), np.diff(row_splits))
    return tf.cast(mean, tf.float32)


def spread(values: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Repeats a value a block, `[num_blocks]`, for each element of the block."""
    widths = np.diff(row_splits)
    # Runs of blocks of equal width, so that few operations do for many buckets.
    bounds = np.flatnonzero(np.diff(widths)) + 1
    parts = [
        tf.reshape(tf.repeat(values[a:b, tf.newaxis], widths[a], axis=1), [-1])
        for a, b in zip([0, *bounds], [*bounds, len(widths)], strict=True)
        if a < b
    ]
    return tf.concat(parts, 0) if parts else values


def _sum_of_magnitudes(x: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    return _reduce_blocks(tf.cast(tf.abs(x), tf.float64), row_splits, tf.add)


def _in_parts(values: tf.Tensor, sizes: Sequence[int] | None) -> tf.Tensor | Parts:
    return values if sizes is None else Parts(tf.split(values, sizes))


def _count_nonfinite(x: tf.Tensor) -> tf.Tensor:
    return tf.math.count_nonzero(tf.logical_not(tf.math.is_finite(x)))


def _divide(x: tf.Tensor, divisor: np.ndarray | int) -> tf.Tensor:
    # Inside functions TensorFlow turns `x / constant` into x * (1 / constant), whose
    # last bit may differ. This division it leaves as it is; no divisor is 0.
    return tf.math.divide_no_nan(x, tf.cast(divisor, x.dtype))


def _powers(base: int) -> tf.Tensor:
    return tf.constant([base**j for j in range(digits_per_word(base))], tf.uint32)


def _reduce_blocks(y: tf.Tensor, row_splits: Sequence[int], combine) -> tf.Tensor:
    """Reduces each block by `combine`, whose neutral element is 0, in a fixed order.

    The order of custom_ops/word_format.h: rows of a chunk in adjacent pairs, then its
    lanes by halves, then the chunks of a block in adjacent pairs.
    """
    splits = np.asarray(row_splits)
    starts, ends = splits[:-1], splits[1:]
    first, last = starts // _CHUNK, (ends - 1) // _CHUNK
    counts = last - first + 1
    block = np.repeat(np.arange(len(starts)), counts)
    chunk = _ranges(counts) + first[block]
    begin = np.maximum(starts[block] - chunk * _CHUNK, 0)
    end = np.minimum(ends[block] - chunk * _CHUNK, _CHUNK)
    chunks = tf.reshape(tf.pad(y, [[0, -y.shape[0] % _CHUNK]]), [-1, _CHUNK])
    # Most chunks lie within a block. Of the others a block counts its own elements.
    cut = np.flatnonzero(end - begin < _CHUNK)
    place = np.arange(_CHUNK)
    own = (place >= begin[cut, np.newaxis]) & (place < end[cut, np.newaxis])
    pieces = tf.where(own, tf.gather(chunks, chunk[cut]), tf.zeros([], y.dtype))
    parts = tf.concat(
        [_reduce_chunks(chunks, combine), _reduce_chunks(pieces, combine)], 0
    )
    source = chunk.copy()
    source[cut] = chunks.shape[0] + np.arange(len(cut))
    parts = tf.gather(parts, source)
    while counts.max(initial=1) > 1:
        begins = np.cumsum(counts) - counts
        counts = (counts + 1) // 2
        left = np.repeat(begins, counts) + 2 * _ranges(counts)
        ends = np.append(begins, parts.shape[0])[1:]
        alone = left + 1 == np.repeat(ends, counts)
        right = tf.gather(parts, np.where(alone, left, left + 1))
        left = tf.gather(parts, left)
        parts = tf.where(alone, left, combine(left, right))
    return parts


def _reduce_chunks(chunks: tf.Tensor, combine) -> tf.Tensor:
    """Reduces the rows of `[num_chunks, 512]`."""
    parts = tf.reshape(chunks, [-1, _CHUNK // _LANES, _LANES])
    while parts.shape[1] > 1:
        pairs = tf.reshape(parts, [-1, parts.shape[1] // 2, 2 * _LANES])
        parts = combine(pairs[:, :, :_LANES], pairs[:, :, _LANES:])
    parts = parts[:, 0]
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = combine(parts[:, :half], parts[:, half:])
    return parts[:, 0]


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Concatenates range(count) for each count."""
    ends = np.cumsum(counts)
    return np.arange(math.floor(counts.sum())) - np.repeat(ends - counts, counts)
