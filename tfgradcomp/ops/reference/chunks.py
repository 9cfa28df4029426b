"""The largest elements of each chunk: positions near their entropy, values of few bits.

A chunk is a block of at most `chunk` elements. Its k largest elements, fewer in a
shorter one, take a fixed number of words, bit by bit from the low end of the first:

- the upper parts of the positions, in unary: bit `(p_i >> low) + i` is 1 for the i-th
  position in ascending order, all others are 0;
- the `low` lower bits of each position;
- `bits` bits for each value: those of its level, then its sign, 1 for minus.

With `low = floor(log2(chunk / k))` this is the code of Elias and Fano. Where chunk / k
is a power of two it takes less than `low + 2` bits a position, about half a bit more
than the entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.blocks import widths
from tfgradcomp.ops.reference.codes import pack_codes, unpack_codes
from tfgradcomp.ops.reference.levels import fixed_point, power_of_two
from tfgradcomp.ops.reference.vectors import exponent, mean_of_workers

MOST_IN_CHUNK = 2**16
_NOWHERE = MOST_IN_CHUNK  # A position behind all others.


class ChunkFormat(NamedTuple):
    """The format of a chunk.

    Attributes:
        k: The most elements that are sent.
        chunk: Elements of a whole chunk.
        bits: Bits of a value.
    """

    k: int
    chunk: int
    bits: int

    @property
    def low(self) -> int:
        """Lower bits of a position."""
        return (self.chunk // self.k).bit_length() - 1

    @property
    def unary(self) -> int:
        """Bits of the upper parts of all positions."""
        return self.k + (self.chunk - 1 >> self.low)

    @property
    def words(self) -> int:
        """Words of a chunk."""
        return -(-(self.unary + self.k * (self.low + self.bits)) // 32)

    @property
    def levels(self) -> int:
        """Number of magnitudes."""
        return 2 ** (self.bits - 1)

    def share(self, width):
        """Returns how many elements a chunk of some width sends."""
        return -(-self.k * width // self.chunk)


def pack_largest(
    x: Vector, row_splits: Sequence[int], k: int, chunk: int, bits: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Finds the largest elements of each block, and packs positions and values.

    Of equal magnitudes the first are taken, in the order of their bits, in which NaN is
    above all numbers. The magnitudes are split at their mean; with 3 bits, both parts
    are split at theirs. An element's level is the mean of its part. Sums are those of
    `find_levels`, exact in any order; a mean that would be denormal is 0. All levels of
    a block with an element that is infinite or NaN are 0.

    Args:
        row_splits: The blocks, of at most `chunk` elements each.
        k: Elements that a block of `chunk` elements sends. A block of w elements sends
            k w / chunk, rounded up.
        chunk: Most elements of a block, at most 2**16.
        bits: Bits of a value, 1 to 3.

    Returns:
        The words, int32 `[num_blocks * words]`; the levels, float32 `[num_blocks, 2 **
        (bits - 1)]`, ascending; and the number of elements that are infinite or NaN.
    """
    form = ChunkFormat(k, chunk, bits)
    x = tf.convert_to_tensor(x)
    word = tf.bitcast(x, tf.int32)
    start, width = _starts(row_splits), _widths(row_splits)
    place = tf.range(chunk, dtype=tf.int64)
    element = tf.minimum(start + place, tf.size(word, tf.int64) - 1)
    rows = tf.gather(word, element)
    magnitude = tf.cast(rows & 0x7FFFFFFF, tf.int64)
    key = magnitude * MOST_IN_CHUNK + (MOST_IN_CHUNK - 1 - place)
    key = tf.math.top_k(tf.where(place < width, key, -1), k).values
    rank = tf.range(k, dtype=tf.int64)
    position = MOST_IN_CHUNK - 1 - key % MOST_IN_CHUNK
    is_sent = rank < form.share(width)
    # Those that are not sent move to the end.
    position = tf.sort(tf.where(is_sent, position, _NOWHERE), axis=1)
    position = tf.where(is_sent, position, 0)
    sent = tf.where(is_sent, tf.gather(rows, position, batch_dims=1), 0)
    levels, code = _levels(sent & 0x7FFFFFFF, is_sent, bits)
    code += tf.where(sent < 0, form.levels, 0)
    count = tf.size(start, tf.int64)
    row = tf.range(count)[:, tf.newaxis] * form.unary
    upper = row + tf.where(is_sent, position // 2**form.low + rank, 0)
    unary = tf.math.unsorted_segment_sum(
        tf.cast(is_sent, tf.int32), upper, count * form.unary
    )
    parts = [
        tf.reshape(unary, [-1, form.unary]),
        _bits_of(tf.cast(position, tf.int32), form.low),
        _bits_of(tf.where(is_sent, code, 0), bits),
    ]
    stream = tf.concat(parts, 1)
    stream = tf.pad(stream, [[0, 0], [0, 32 * form.words - stream.shape[1]]])
    words = pack_codes(tf.reshape(stream, [-1]), 2)
    nonfinite = tf.math.count_nonzero(word & 0x7FFFFFFF >= 0x7F800000)
    return words, levels, nonfinite


def mean_of_largest(
    words: tf.Tensor,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    k: int,
    chunk: int,
    bits: int,
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Returns the mean of N vectors of largest elements, added in the order of workers.

    Positions beyond the end of a block, which no sender writes, are left out.

    Args:
        words: int32 `[N, num_blocks * words]`.
        levels: float32 `[N, num_blocks, 2 ** (bits - 1)]`.
        row_splits: As for `pack_largest`, like the others.
    """
    form = ChunkFormat(k, chunk, bits)
    start, width = _starts(row_splits), _widths(row_splits)
    size = row_splits[-1]

    def decode(words, levels):
        stream = tf.reshape(
            unpack_codes(words, 2, 32 * tf.size(words)), [-1, 32 * form.words]
        )
        end = form.unary + k * form.low
        low = _number_of(stream[:, form.unary : end], k, form.low)
        code = _number_of(stream[:, end : end + k * bits], k, bits)
        rank = tf.cumsum(stream[:, : form.unary], axis=1) - 1
        item = tf.clip_by_value(rank, 0, k - 1)
        upper = tf.range(form.unary) - rank
        position = upper * 2**form.low + tf.gather(low, item, batch_dims=1)
        position = tf.cast(position, tf.int64)
        code = tf.gather(code, item, batch_dims=1)
        value = tf.gather(levels, code % form.levels, batch_dims=1)
        value = tf.where(code < form.levels, value, -value)
        is_sent = (stream[:, : form.unary] > 0) & (rank < k) & (position < width)
        element = tf.where(is_sent, start + position, -1)
        # A negative index is no element.
        return tf.math.unsorted_segment_sum(
            tf.reshape(value, [-1]), tf.reshape(element, [-1]), size
        )

    return mean_of_workers(decode, [words, levels], sizes)


def _starts(row_splits):
    # Graphs miscompute a slice of a stack that adds an axis.
    return tf.expand_dims(tf.convert_to_tensor(row_splits, tf.int64)[:-1], 1)


def _widths(row_splits):
    return tf.expand_dims(tf.cast(widths(row_splits), tf.int64), 1)


def _levels(magnitude, is_sent, bits) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the levels of each chunk, and each element's level.

    Args:
        magnitude: Bits of the magnitudes, int32 `[num_blocks, k]`, 0 if not sent.
        is_sent: Whether an element is sent, of the same shape.
        bits: Bits of a value.
    """
    top = exponent(tf.reduce_max(magnitude, axis=1, keepdims=True))
    magnitude = tf.where(top < 255, magnitude, 0)
    # Integers in float64 below 2**46, so that sums are exact.
    q = tf.cast(fixed_point(magnitude, power_of_two(156 - top)), tf.float64)
    code = tf.zeros_like(magnitude)

    def totals(count):
        part = tf.one_hot(code, count, dtype=tf.float64)
        part *= tf.cast(is_sent, tf.float64)[..., tf.newaxis]
        number = tf.reduce_sum(part, axis=1)
        return tf.reduce_sum(part * q[..., tf.newaxis], axis=1), number

    total, number = totals(1)
    mean = tf.math.divide_no_nan(total, number)
    for bit in range(1, bits):
        own = [tf.gather(part, code, batch_dims=1) for part in (total, number)]
        code = 2 * code + tf.cast(q * own[1] >= own[0], tf.int32)
        total, number = totals(2**bit)
        # A part without elements is that of its elder.
        elder = tf.repeat(mean, 2, axis=1)
        mean = tf.where(number > 0, tf.math.divide_no_nan(total, number), elder)
    mean *= power_of_two(top - 156)
    levels = tf.cast(tf.where(mean >= 2.0**-126, mean, 0), tf.float32)
    return levels, code


def _bits_of(numbers, count):
    """Returns the lower bits of int32 `[num_blocks, k]`, `[num_blocks, k * count]`."""
    bits = tf.bitwise.right_shift(numbers[..., tf.newaxis], tf.range(count)) & 1
    return tf.reshape(bits, [tf.shape(numbers)[0], numbers.shape[1] * count])


def _number_of(bits, k, count):
    """Returns the numbers of which `_bits_of` returned the bits."""
    table = tf.reshape(bits, [tf.shape(bits)[0], k, count])
    return tf.reduce_sum(tf.bitwise.left_shift(table, tf.range(count)), axis=2)
