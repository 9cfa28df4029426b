"""Codes of any base: rounded at random, packed into words, added up."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.core.word_format import digits_per_word, words_for
from tfgradcomp.ops.reference.blocks import spread
from tfgradcomp.ops.reference.random_numbers import uniform
from tfgradcomp.ops.reference.vectors import in_parts, length


def pack_codes(codes: tf.Tensor, base: int) -> tf.Tensor:
    """Packs integer codes in `[0, base)`, shape `[count]`, into int32 words."""
    digits = digits_per_word(base)
    count = length(codes)
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
    size = words.shape[-1]
    last = -1 if size is None else size * digits_per_word(base)
    shape = [*words.shape[:-1], last]
    return tf.cast(tf.reshape(table, shape)[..., :count], tf.int32)


def pack_ternary(
    x: Vector,
    limit: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor,
) -> tf.Tensor:
    """Rounds to -s, 0, s at random and packs the signs plus one into base-3 words.

    Element j is kept where u_j s < min(|x_j|, limit), u_j the uniform numbers of the
    stream: with probability min(|x_j|, limit) / s.

    Args:
        limit: Largest magnitude after clipping, float32 `[num_blocks]`.
        scale: s, at least the largest clipped magnitude, float32 `[num_blocks]`.
    """
    x = tf.convert_to_tensor(x)
    magnitude, most = tf.abs(x), spread(limit, row_splits)
    magnitude = tf.where(most < magnitude, most, magnitude)
    threshold = uniform(stream, length(x)) * spread(scale, row_splits)
    sign = tf.where(tf.bitcast(x, tf.int32) < 0, -1, 1)
    return pack_codes(tf.where(threshold < magnitude, sign, 0) + 1, 3)


def sum_codes(
    words: tf.Tensor, base: int, count: int, sum_base: int | None = None
) -> tf.Tensor:
    """Adds up the codes of N workers, and packs the sums.

    Words whose `sum_base` holds the largest total can be added further, as plain int32
    numbers that wrap: their digits add up without a carry. So an ordinary all-reduce
    adds the codes of all workers if each worker writes them in the base of their sum.

    Args:
        base: Base of the codes.
        count: Number of codes of a worker.
        sum_base: Base of the result, at least N * (base - 1) + 1, its default.

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
) -> Vector:
    """Decodes evenly spaced levels: scale * (step * sum_i code_i - zero).

    Args:
        scale: float32 `[num_blocks]`.
        base: Base of the codes.
        step: Distance of two levels, an integer in units of the scale.
        zero: Integer that counts as 0.
    """
    total = tf.reduce_sum(unpack_codes(words, base, row_splits[-1]), axis=0)
    levels = tf.cast(step * total - zero, tf.float32)
    return in_parts(spread(scale, row_splits) * levels, sizes)


def _powers(base: int) -> tf.Tensor:
    return tf.constant([base**j for j in range(digits_per_word(base))], tf.uint32)
