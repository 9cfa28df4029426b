"""Blocks of a vector: their statistics, and values spread over them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.core.word_format import CHUNK
from tfgradcomp.ops.reference.vectors import divide

_LANES = 8
# Of `Statistics`, what takes time of its own beside the maximum.
SUMS = ("l1", "sum_of_squares", "sum")


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


def block_statistics(
    x: Vector, row_splits: Sequence[int], sums: Collection[str] = SUMS
) -> Statistics:
    """Returns statistics of each block of float32 `[count]`, in float64.

    The order of the sums depends on the blocks alone.

    Args:
        x: The vector.
        row_splits: Where blocks begin, and the end of the last.
        sums: Those of `SUMS` that are computed; the others are 0.

    Raises:
        ValueError: `sums` has other names.
    """
    if unknown := {*sums} - {*SUMS}:
        raise ValueError(f"sums must be among {SUMS}. Received: {sorted(unknown)}")
    x = tf.convert_to_tensor(x)
    finite_bits = 0x7F800000
    magnitude_bits = tf.bitcast(x, tf.int32) & 0x7FFFFFFF
    wide = tf.cast(x, tf.float64)
    # The bits have the order of the magnitudes, with NaN above all numbers.
    bits = reduce_blocks(magnitude_bits, row_splits, tf.maximum)
    maximum = tf.cast(tf.bitcast(bits, tf.float32), tf.float64)
    # An int32 would count 2**32 such elements as none.
    count = tf.cast(magnitude_bits >= finite_bits, tf.float64)

    def sum_of(name, terms):
        if name not in sums:
            return tf.zeros_like(maximum)
        return reduce_blocks(terms, row_splits, tf.add) + 0.0

    return Statistics(
        maximum,
        sum_of("l1", tf.abs(wide)),
        sum_of("sum_of_squares", wide * wide),
        sum_of("sum", wide),
        reduce_blocks(count, row_splits, tf.add),
    )


def mean_magnitude(x: Vector, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the mean |x| of each block, float32 `[num_blocks]`."""
    return mean_of_sums(sum_of_magnitudes(x, row_splits), row_splits)


def mean_of_sums(sums: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the mean of each block, float32, from its sum, float64."""
    return tf.cast(divide(sums, widths(row_splits)), tf.float32)


def spread(values: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Repeats the value of each block, `[num_blocks]`, for each of its elements."""
    width = widths(row_splits)
    if tf.is_tensor(width):
        return tf.repeat(values, width)
    bounds = np.flatnonzero(np.diff(width)) + 1
    if bounds.size and tf.executing_eagerly():
        return tf.gather(values, block_of(row_splits))
    # A graph would keep as many indices as there are elements. Blocks of equal width
    # are repeated together: few operations for many blocks.
    parts = [
        tf.reshape(tf.repeat(values[a:b, tf.newaxis], width[a], axis=1), [-1])
        for a, b in zip([0, *bounds], [*bounds, len(width)], strict=True)
        if a < b
    ]
    return tf.concat(parts, 0) if parts else values


def widths(row_splits: Sequence[int]) -> np.ndarray:
    """Returns the size of each block; a tensor if `row_splits` is a tensor."""
    if tf.is_tensor(row_splits):
        return row_splits[1:] - row_splits[:-1]  # type: ignore[operator]
    return np.diff(row_splits)


def block_of(row_splits: Sequence[int]) -> np.ndarray:
    """Returns the block of each element, int32; a tensor where `row_splits` is."""
    width = widths(row_splits)
    if tf.is_tensor(width):
        return tf.repeat(tf.range(tf.size(width)), width)
    return np.repeat(np.arange(len(width), dtype=np.int32), width)


def sum_of_magnitudes(x: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the sum of |x| of each block, float64 `[num_blocks]`."""
    return reduce_blocks(tf.cast(tf.abs(x), tf.float64), row_splits, tf.add)


def reduce_blocks(y: tf.Tensor, row_splits: Sequence[int], combine) -> tf.Tensor:
    """Reduces each block by `combine`, whose neutral element is 0, in a fixed order.

    custom_ops/word_format.h states the order: rows of a chunk in adjacent pairs, then
    its lanes by halves, then the chunks of a block in adjacent pairs.
    """
    if tf.is_tensor(row_splits):
        return _reduce_varying(y, row_splits, combine)
    splits = np.asarray(row_splits)
    starts, ends = splits[:-1], splits[1:]
    first, last = starts // CHUNK, (ends - 1) // CHUNK
    counts = last - first + 1
    block = np.repeat(np.arange(len(starts)), counts)
    chunk = _ranges(counts) + first[block]
    begin = np.maximum(starts[block] - chunk * CHUNK, 0)
    end = np.minimum(ends[block] - chunk * CHUNK, CHUNK)
    chunks = tf.reshape(tf.pad(y, [[0, -y.shape[0] % CHUNK]]), [-1, CHUNK])
    # Most chunks lie within one block. For the others, each block takes its elements.
    cut = np.flatnonzero(end - begin < CHUNK)
    place = np.arange(CHUNK)
    is_inside = (place >= begin[cut, np.newaxis]) & (place < end[cut, np.newaxis])
    pieces = tf.where(is_inside, tf.gather(chunks, chunk[cut]), tf.zeros([], y.dtype))
    parts = _reduce_chunks(tf.concat([chunks, pieces], 0), combine)
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


def _reduce_varying(y: tf.Tensor, row_splits: tf.Tensor, combine) -> tf.Tensor:
    """Reduces blocks whose ends are a tensor, in the same order."""
    starts, ends = row_splits[:-1], row_splits[1:]
    first = starts // CHUNK
    counts = (ends - 1) // CHUNK - first + 1
    block = tf.repeat(tf.range(tf.size(counts, tf.int64)), counts)
    chunk = _varying_ranges(counts) + tf.gather(first, block)
    place = chunk[:, tf.newaxis] * CHUNK + tf.range(CHUNK, dtype=tf.int64)
    is_inside = place >= tf.gather(starts, block)[:, tf.newaxis]
    is_inside &= place < tf.gather(ends, block)[:, tf.newaxis]
    chunks = tf.reshape(tf.pad(y, [[0, -tf.size(y) % CHUNK]]), [-1, CHUNK])
    pieces = tf.where(is_inside, tf.gather(chunks, chunk), tf.zeros([], y.dtype))

    def halve(parts, counts):
        begins = tf.cumsum(counts, exclusive=True)
        halves = (counts + 1) // 2
        left = tf.repeat(begins, halves) + 2 * _varying_ranges(halves)
        alone = left + 1 >= tf.repeat(begins + counts, halves)
        right = tf.gather(parts, tf.where(alone, left, left + 1))
        left = tf.gather(parts, left)
        return tf.where(alone, left, combine(left, right)), halves

    parts, _ = tf.while_loop(
        lambda _, counts: tf.reduce_max(counts) > 1,
        halve,
        [_reduce_chunks(pieces, combine), counts],
        shape_invariants=[tf.TensorShape([None]), counts.shape],
    )
    return tf.ensure_shape(parts, counts.shape)


def _varying_ranges(counts: tf.Tensor) -> tf.Tensor:
    """Concatenates range(count) for each count."""
    begins = tf.cumsum(counts, exclusive=True)
    total = tf.reduce_sum(counts)
    return tf.range(total, dtype=tf.int64) - tf.repeat(begins, counts)


def _reduce_chunks(chunks: tf.Tensor, combine) -> tf.Tensor:
    """Reduces the rows of `[num_chunks, CHUNK]`."""
    parts = tf.reshape(chunks, [-1, CHUNK // _LANES, _LANES])
    while parts.shape[1] > 1:
        pairs = tf.reshape(parts, [-1, parts.shape[1] // 2, 2 * _LANES])
        parts = combine(*tf.split(pairs, 2, 2))
    parts = parts[:, 0]
    while parts.shape[1] > 1:
        parts = combine(*tf.split(parts, 2, 1))
    return parts[:, 0]


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Concatenates range(count) for each count."""
    ends = np.cumsum(counts)
    return np.arange(math.floor(counts.sum())) - np.repeat(ends - counts, counts)
