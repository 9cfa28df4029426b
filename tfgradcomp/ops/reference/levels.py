"""Levels of blocks: finding them, rounding to them and averaging them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.blocks import (
    block_of,
    reduce_blocks,
    spread,
    widths,
)
from tfgradcomp.ops.reference.codes import pack_codes, unpack_codes
from tfgradcomp.ops.reference.random_numbers import uniform
from tfgradcomp.ops.reference.vectors import (
    SIGN,
    exponent,
    length,
    mean_of_workers,
)


def find_levels(
    x: Vector,
    row_splits: Sequence[int],
    rule: str,
    count: int,
    sweeps: int = 0,
):
    """Finds the levels that the elements of each block are rounded to.

    q are the block's elements as integers: multiples, halves rounded to even, of the
    power of two that gives the largest magnitude 30 bits. So sums are exact in any
    order. The rules:

    - `"optimal"`: the ends are the smallest and the largest element; then, level by
      level of a binary tree, the middle of `l` and `r`, elements by rank, is the m-th
      largest of those from `l` to `r`, m = ceil(sum(q - q_l) / (q_r - q_l)) over them,
      at least 1. `count` is a power of two plus 1. Each sweep then does so for every
      level between its two neighbours, from the second on.
    - `"quantiles"`: the elements of rank k (n - 1) / (count - 1), halves upwards.
    - `"symmetric"`: -b and b, where b is the element of |x| for which n q_b is nearest
      to the sum of all |q| with |x| >= b; the smallest if there are several. `count`
      is 2.
    - `"means"`: the mean of the elements below the mean, the mean, and the mean of the
      other elements. A mean of no elements is the mean of all. `count` is 3.

    Elements are ordered by their bits, in which both zeros are equal; a denormal has
    q = 0. A mean that would be denormal is 0. No level is -0.

    Args:
        rule: The name of a rule.
        count: Number of levels.
        sweeps: Number of sweeps of `"optimal"`.

    Returns:
        The levels in ascending order, float32 `[num_blocks, count]`, 0 for a block with
        an element that is infinite or NaN; and the number of such elements (int64).
    """
    x = tf.convert_to_tensor(x)
    bits = tf.bitcast(x, tf.int32)
    magnitude = bits & 0x7FFFFFFF
    top = exponent(reduce_blocks(magnitude, row_splits, tf.maximum))
    # A block that is not finite becomes a block of zeros, whose levels are 0.
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
        }[rule](_integers(value, top, row_splits), value, row_splits, count, sweeps)
        found = tf.gather(value, indices)
        if rule == "symmetric":
            # By their bits: a processor may take denormals for zeros.
            found = tf.concat([tf.where(found > 0, found | SIGN, 0), found], 1)
        levels = tf.bitcast(found, tf.float32)
    return levels, tf.math.count_nonzero(magnitude >= 0x7F800000)


def pack_levels(
    x: Vector,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """Rounds each element to a level of its block, at random and without bias.

    With k the number of inner levels (all but the first and the last) that are <= x_j,
    the code is k + 1 where u_j (b_{k+1} - b_k) < x_j - b_k, else k; u_j are the uniform
    numbers of the stream. An element beyond the ends goes to the nearest end.

    Args:
        levels: b, ascending, float32 `[num_blocks, count]`.
        stream: The random stream. None: the code is k.

    Returns:
        The words of the codes: of base `count`, or `count - 1` without a stream.
    """
    x = tf.convert_to_tensor(x)
    count = levels.shape[1]
    table = tf.reshape(levels, [-1])
    first = tf.convert_to_tensor(count * block_of(row_splits))
    k = _inner_levels_below(x, table, first, count - 2)
    if stream is None:
        return pack_codes(k, count - 1)
    low = tf.gather(table, first + k)
    high = tf.gather(table, first + k + 1)
    up = uniform(stream, length(x)) * (high - low) < x - low
    return pack_codes(k + tf.cast(up, tf.int32), count)


def mean_of_levels(
    words: tf.Tensor,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Returns the mean of N vectors of levels, added in the order of workers.

    The codes are of base `count`, where `levels` is float32 `[N, num_blocks, count]`.
    """
    count = levels.shape[-1]

    def decode(words, table):
        codes = unpack_codes(words, count, row_splits[-1])
        place = count * block_of(row_splits) + codes
        return tf.gather(tf.reshape(table, [-1]), place)

    return mean_of_workers(decode, [words, levels], sizes)


def _inner_levels_below(x, table, first, num_inner) -> tf.Tensor:
    """Counts the inner levels that are <= x, by bisection.

    The flat `table` has the levels of all blocks. Those of an element's block begin at
    `first`, and `num_inner` of them are inner levels.
    """
    k = tf.zeros_like(x, tf.int32)
    # For 255 inner levels: steps of 128, 64, ... 1.
    for bit in reversed(range(num_inner.bit_length())):
        candidate = k + 2**bit
        level = tf.gather(table, first + tf.minimum(candidate, num_inner))
        k = tf.where((candidate <= num_inner) & (level <= x), candidate, k)
    return k


def _ordered(bits: tf.Tensor) -> tf.Tensor:
    """Returns integers in the order of the numbers with these bits; its own inverse."""
    return bits ^ (tf.bitwise.right_shift(bits, 31) & 0x7FFFFFFF)


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Returns powers of two of int32 exponents, float64."""
    biased = tf.cast(exponent, tf.int64) + 1023
    shift = tf.constant(52, tf.int64)
    return tf.bitcast(tf.bitwise.left_shift(biased, shift), tf.float64)


def _sorted_in_blocks(key: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Sorts the int32 keys of each block."""
    block = tf.cast(block_of(row_splits), tf.int64)
    joined = tf.sort(block * 2**32 + tf.cast(key, tf.int64) + 2**31)
    return tf.cast(joined - block * 2**32 - 2**31, tf.int32)


def fixed_point(bits: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns q of `find_levels`, int64, for elements with these `bits`.

    `scale` is the power of two, float64, that gives the largest magnitude 30 bits.
    """
    x = tf.cast(tf.bitcast(bits, tf.float32), tf.float64)
    # Processors differ in their treatment of denormals.
    x = tf.where(exponent(bits & 0x7FFFFFFF) > 0, x, 0)
    return tf.cast(tf.round(x * scale), tf.int64)


def _integers(bits, top, row_splits) -> tf.Tensor:
    """Returns q; `top` is the exponent field of each block's largest magnitude."""
    return fixed_point(bits, spread(power_of_two(156 - top), row_splits))


def _ends(row_splits: Sequence[int]):
    splits = tf.convert_to_tensor(row_splits, tf.int64)
    return splits[:-1], splits[1:] - 1


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
    block = tf.convert_to_tensor(block_of(row_splits))
    first, last = _ends(row_splits)
    num_blocks = length(first)
    total = tf.cumsum(q)
    above = tf.gather(tf.gather(total, last), block) - total + q
    distance = tf.abs(spread(last - first + 1, row_splits) * q - above)
    # The first of several equal elements has all others above it or beside it.
    place = tf.range(length(q), dtype=tf.int64)
    again = tf.equal(value, tf.roll(value, 1, 0)) & (place > spread(first, row_splits))
    distance = tf.where(again, tf.int64.max, distance)
    least = tf.math.unsorted_segment_min(distance, block, num_blocks)
    nearest = tf.equal(distance, tf.gather(least, block))
    place = tf.where(nearest, place, tf.int64.max)
    return tf.math.unsorted_segment_min(place, block, num_blocks)[:, tf.newaxis]


def _mean_levels(bits, top, row_splits) -> tf.Tensor:
    block = tf.convert_to_tensor(block_of(row_splits))
    num_blocks = length(_ends(row_splits)[0])
    q = _integers(bits, top, row_splits)
    unit = power_of_two(top - 156)

    def total(values):
        return tf.math.unsorted_segment_sum(values, block, num_blocks)

    def mean(total, count):
        wide = tf.math.divide_no_nan(
            tf.cast(total, tf.float64), tf.cast(count, tf.float64)
        )
        wide *= unit
        return tf.cast(tf.where(tf.abs(wide) >= 2.0**-126, wide, 0), tf.float32)

    size = tf.cast(widths(row_splits), tf.int64)
    middle = mean(total(q), size)
    edge = _ordered(tf.bitcast(middle, tf.int32))
    is_below = _ordered(bits) < spread(edge, row_splits)
    below, number = total(tf.where(is_below, q, 0)), total(tf.cast(is_below, tf.int64))
    low = tf.where(number > 0, mean(below, number), middle)
    above = mean(total(q) - below, size - number)
    high = tf.where(number < size, above, middle)
    return tf.stack([low, middle, high], 1)
