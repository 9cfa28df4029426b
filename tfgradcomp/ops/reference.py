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

_SIGN = -(2**31)  # The sign's bit.


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
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """Decodes evenly spaced levels: scale * (step * sum_i code_i - zero).

    Args:
        words: int32 `[N, words]`, the codes of N workers.
        scale: float32 `[num_blocks]`.
        row_splits: The blocks.
        base: Base of the codes.
        step: Integer between two levels, in units of the scale.
        zero: Integer that counts as 0.
        sizes: Elements of each of the parts that are returned, or None for no parts.

    Returns:
        float32 `[count]`, or `Parts` of it, flat tensors.
    """
    total = tf.reduce_sum(unpack_codes(words, base, row_splits[-1]), axis=0)
    levels = tf.cast(step * total - zero, tf.float32)
    return _in_parts(spread(scale, row_splits) * levels, sizes)


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


def find_levels(
    x: tf.Tensor | Parts,
    row_splits: Sequence[int],
    rule: str,
    count: int,
    sweeps: int = 0,
):
    """Finds the levels that each block of float32 `[size]` is rounded to.

    With q the block's elements as integers, multiples of the power of two that gives
    the largest magnitude 30 bits (halves to even), so that sums are exact in any order:

    - `"optimal"`: the ends are the smallest and the largest element; then, level by
      level of a binary tree, the middle of `l` and `r`, elements by rank, is the m-th
      largest of those from `l` to `r`, m = ceil(sum(q - q_l) / (q_r - q_l)) over them,
      at least 1. `count` is a power of two plus 1. Each sweep then does so for every
      level between its two neighbours, from the second on.
    - `"quantiles"`: the elements of rank k (n - 1) / (count - 1), halves upwards.
    - `"symmetric"`: -b and b, the element of |x| for which n q_b comes nearest to the
      sum of all |q| with |x| >= b; the smallest, if there are several. `count` is 2.
    - `"means"`: the mean of the elements below the mean, the mean, the mean of the
      others; where there are none, the mean. `count` is 3.

    Elements count by their bits: both zeros are one, and so is q = 0 for a denormal.
    Levels that are means are 0 where they would be denormal. No level is -0.

    Args:
        x: The vector.
        row_splits: The blocks.
        rule: One of the above.
        count: Number of levels.
        sweeps: Of `"optimal"`.

    Returns:
        The levels in ascending order, float32 `[num_blocks, count]`, 0 for a block with
        an element that is infinite or NaN; and the number of such elements (int64).
    """
    x = tf.convert_to_tensor(x)
    bits = tf.bitcast(x, tf.int32)
    magnitude = bits & 0x7FFFFFFF
    top = _exponent(_reduce_blocks(magnitude, row_splits, tf.maximum))
    # A block that has no levels becomes one of zeros, whose levels are 0.
    bits = tf.where(spread(top < 255, row_splits) & (magnitude > 0), bits, 0)
    if rule == "means":
        levels = _mean_levels(bits, top, row_splits)
    else:
        key = bits & 0x7FFFFFFF if rule == "symmetric" else _ordered(bits)
        key = _sorted_in_blocks(key, row_splits)
        value = _ordered(key)
        indices = {
            "optimal": _optimal_indices,
            "quantiles": _quantile_indices,
            "symmetric": _symmetric_index,
        }[rule](_fixed_point(value, top, row_splits), value, row_splits, count, sweeps)
        found = tf.gather(value, indices)
        if rule == "symmetric":
            # By bits: a processor may take denormals for zeros.
            found = tf.concat([tf.where(found > 0, found | _SIGN, 0), found], 1)
        levels = tf.bitcast(found, tf.float32)
    return levels, tf.math.count_nonzero(magnitude >= 0x7F800000)


def pack_levels(
    x: tf.Tensor | Parts,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """Rounds each element to a level of its block, at random and without bias.

    With k the number of inner levels (all but the first and the last) that are <= x_j,
    the code is k + 1 where u_j (b_{k+1} - b_k) < x_j - b_k, else k; u_j are the uniform
    numbers of the stream. What lies outside goes to the nearest end.

    Args:
        x: float32 `[size]`.
        levels: b, ascending, float32 `[num_blocks, count]`.
        row_splits: The blocks.
        stream: The random stream. None: the code is k.

    Returns:
        The words of the codes: of base `count`, or `count - 1` without a stream.
    """
    x = tf.convert_to_tensor(x)
    count = levels.shape[1]
    k = tf.zeros_like(x, tf.int32)
    for inner in range(1, count - 1):
        k += tf.cast(spread(levels[:, inner], row_splits) <= x, tf.int32)
    if stream is None:
        return pack_codes(k, count - 1)
    place = count * _block_of(row_splits) + k
    low = tf.gather(tf.reshape(levels, [-1]), place)
    high = tf.gather(tf.reshape(levels, [-1]), place + 1)
    up = uniform(stream, x.shape[0]) * (high - low) < x - low
    return pack_codes(k + tf.cast(up, tf.int32), count)


def mean_of_levels(
    words: tf.Tensor,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """Returns the mean of N vectors of levels, added in the order of workers.

    Args:
        words: int32 `[N, words]`, codes of base `count`.
        levels: What they stand for, float32 `[N, num_blocks, count]`.
        row_splits: The blocks.
        sizes: As in `sum_levels`.

    Returns:
        float32 `[size]`, or `Parts` of it.
    """
    count = levels.shape[-1]
    total = None
    for codes, table in zip(tf.unstack(words), tf.unstack(levels), strict=True):
        codes = unpack_codes(codes, count, row_splits[-1])
        place = count * _block_of(row_splits) + codes
        value = tf.gather(tf.reshape(table, [-1]), place)
        total = value if total is None else total - -value
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


def _ordered(bits: tf.Tensor) -> tf.Tensor:
    """Integers in the order of the numbers whose bits are given; its own inverse."""
    return bits ^ (tf.bitwise.right_shift(bits, 31) & 0x7FFFFFFF)


def _exponent(magnitude: tf.Tensor) -> tf.Tensor:
    """The exponent field of non-negative numbers, of their bits."""
    return tf.bitwise.right_shift(magnitude, 23)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    biased = tf.cast(exponent, tf.int64) + 1023
    shift = tf.constant(52, tf.int64)
    return tf.bitcast(tf.bitwise.left_shift(biased, shift), tf.float64)


def _block_of(row_splits: Sequence[int]) -> np.ndarray:
    """The block of each element, int32 `[size]`."""
    widths = np.diff(row_splits)
    return np.repeat(np.arange(len(widths), dtype=np.int32), widths)


def _sorted_in_blocks(key: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Sorts the int32 keys of each block."""
    block = tf.constant(_block_of(row_splits), tf.int64)
    joined = tf.sort(block * 2**32 + tf.cast(key, tf.int64) + 2**31)
    return tf.cast(joined - block * 2**32 - 2**31, tf.int32)


def _fixed_point(bits, top, row_splits) -> tf.Tensor:
    """The q of `find_levels`, int64; `top` is the exponent field of the largest."""
    scale = _power_of_two(156 - top)
    x = tf.cast(tf.bitcast(bits, tf.float32), tf.float64)
    # Of a denormal, what a processor makes is not certain.
    x = tf.where(_exponent(bits & 0x7FFFFFFF) > 0, x, 0)
    scaled = x * spread(scale, row_splits)
    return tf.cast(tf.round(scaled), tf.int64)


def _ends(row_splits: Sequence[int]):
    splits = np.asarray(row_splits, np.int64)
    return tf.constant(splits[:-1]), tf.constant(splits[1:] - 1)


def _optimal_indices(q, value, row_splits, count, sweeps) -> tf.Tensor:
    total = tf.cumsum(q)
    index = [None] * count
    index[0], index[-1] = _ends(row_splits)

    def middle(left, right):
        low, high = tf.gather(q, left), tf.gather(q, right)
        over = tf.gather(total, right) - tf.gather(total, left) - (right - left) * low
        width = tf.maximum(high - low, 1)
        return right + 1 - tf.maximum((over + width - 1) // width, 1)

    step = count - 1
    while step > 1:
        for left in range(0, count - 1, step):
            index[left + step // 2] = middle(index[left], index[left + step])
        step //= 2
    for _ in range(sweeps):
        for k in range(1, count - 1):
            index[k] = middle(index[k - 1], index[k + 1])
    return tf.stack(index, 1)


def _quantile_indices(q, value, row_splits, count, sweeps) -> tf.Tensor:
    first, last = (end[:, tf.newaxis] for end in _ends(row_splits))
    k = tf.range(count, dtype=tf.int64)
    return first + (2 * k * (last - first) + count - 1) // (2 * (count - 1))


def _symmetric_index(q, value, row_splits, count, sweeps) -> tf.Tensor:
    block, num_blocks = tf.constant(_block_of(row_splits)), len(row_splits) - 1
    first, last = _ends(row_splits)
    total = tf.cumsum(q)
    above = tf.gather(tf.gather(total, last), block) - total + q
    distance = tf.abs(spread(last - first + 1, row_splits) * q - above)
    # Of equal elements the first one has all of them above or beside it.
    place = tf.range(q.shape[0], dtype=tf.int64)
    again = tf.equal(value, tf.roll(value, 1, 0)) & (place > spread(first, row_splits))
    distance = tf.where(again, tf.int64.max, distance)
    least = tf.math.unsorted_segment_min(distance, block, num_blocks)
    nearest = tf.equal(distance, tf.gather(least, block))
    place = tf.where(nearest, place, tf.int64.max)
    return tf.math.unsorted_segment_min(place, block, num_blocks)[:, tf.newaxis]


def _mean_levels(bits, top, row_splits) -> tf.Tensor:
    block, num_blocks = tf.constant(_block_of(row_splits)), len(row_splits) - 1
    q = _fixed_point(bits, top, row_splits)
    unit = _power_of_two(top - 156)

    def total(values):
        return tf.math.unsorted_segment_sum(values, block, num_blocks)

    def mean(total, count):
        wide = tf.math.divide_no_nan(
            tf.cast(total, tf.float64), tf.cast(count, tf.float64)
        )
        wide *= unit
        return tf.cast(tf.where(tf.abs(wide) >= 2.0**-126, wide, 0), tf.float32)

    size = tf.constant(np.diff(row_splits), tf.int64)
    middle = mean(total(q), size)
    edge = _ordered(tf.bitcast(middle, tf.int32))
    is_below = _ordered(bits) < spread(edge, row_splits)
    below, number = total(tf.where(is_below, q, 0)), total(tf.cast(is_below, tf.int64))
    low = tf.where(number > 0, mean(below, number), middle)
    above = mean(total(q) - below, size - number)
    high = tf.where(number < size, above, middle)
    return tf.stack([low, middle, high], 1)


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
