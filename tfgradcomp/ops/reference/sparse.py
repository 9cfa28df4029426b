"""Sparse words: single elements, each with its sign, its magnitude and its index.

The word of element j is its sign (the top bit), d in three bits and j in the lowest
`INDEX_BITS`: it stands for +-scale * 2^-d, the scale that of j's block. The words of a
worker are in the order of j. `NOTHING`, and any other word with an index that the
vector has not got, stands for nothing; such words come last, but inside XLA, where each
element has a word, they come anywhere.

Elements gather what they are given until they are sent: r the terms, v their squares.
With r and v after this step's were added, each product and each sum is rounded to
float32 before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.compat.assertions import checked
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.core.word_format import INDEX_BITS, NOTHING
from tfgradcomp.ops.reference.blocks import reduce_blocks, spread
from tfgradcomp.ops.reference.vectors import (
    SIGN,
    add,
    count_nonfinite,
    divide,
    exponent,
    in_parts,
)

_NORMAL, _INFINITE = 0x00800000, 0x7F800000  # Bits of the least number of each kind.
_MOST = 7  # The largest d.


def pack_unambiguous(
    x: Vector,
    moments: Vector,
    residual: tf.Tensor,
    variance: tf.Tensor,
    alpha: float,
    decay: float,
    row_splits: Sequence[int],
):
    """Packs the elements whose sum outweighs its variance, as powers of two.

    r += x, v += moments. Selected is where r^2 > alpha v (r a normal number). With e
    the exponent of the largest |r| selected in a block, floor(log2 max|r|), a selected
    |r| becomes 2^e where that is less, else the nearer power of two, the larger of two
    equally near; that is 2^(e - d), and it is sent where d <= 7. Then r = v = 0 where
    sent, v = decay v elsewhere.

    Args:
        x: float32 `[count]`.
        moments: What v gathers: sums of squares, float32 `[count]`.
        residual: r, float32 `[count]`.
        variance: v, float32 `[count]`.
        alpha: How many times the variance r^2 has to be.
        decay: Of v.
        row_splits: The blocks.

    Returns:
        The words (int32, as many as are sent); e of each block (int8, -128 where
        nothing is sent); the new r; the new v; and the number of elements of which r or
        v, before the sending, is infinite or NaN (int64).
    """
    r, v = _accumulate(residual, x), _accumulate(variance, moments)
    bits = tf.bitcast(r, tf.int32)
    magnitude = bits & ~SIGN
    selected = (magnitude >= _NORMAL) & (magnitude < _INFINITE) & (r * r > alpha * v)
    top = tf.where(selected, magnitude, 0)
    top = exponent(reduce_blocks(top, row_splits, tf.maximum))
    # One added to the top bit of the mantissa carries where it is to be rounded up.
    d = spread(top, row_splits) - exponent(magnitude + (1 << 22))
    d = tf.maximum(d, 0)
    sent = selected & (d <= _MOST)
    words = _words(sent, (bits & SIGN) | tf.bitwise.left_shift(d, INDEX_BITS))
    exponents = tf.cast(tf.where(top > 0, top - 127, -128), tf.int8)
    left = tf.where(sent, 0.0, r), tf.where(sent, 0.0, v * decay)
    return words, exponents, *left, _count_nonfinite(r, v)


def pack_over_threshold(
    x: Vector,
    moments: Vector | None,
    residual: tf.Tensor,
    variance: tf.Tensor | None,
    threshold: float | tf.Tensor,
    alpha: float,
    decay: float,
):
    """Packs the signs of the elements that have gathered more than a threshold t.

    r += x, v += moments. Sent is where |r| > t and r^2 > alpha v; there
    v = max((v - 2 t |r|) + t^2, 0), and then r = r - sign(r) t. v = decay v everywhere.
    Words have d = 0.

    Args:
        x: float32 `[count]`.
        moments: As in `pack_unambiguous`, or None, with `variance`: no v, and |r| > t
            is enough.
        residual: r, float32 `[count]`.
        variance: v, float32 `[count]`, or None.
        threshold: t, positive; a number, or one for each element, float32 `[count]`.
        alpha: As in `pack_unambiguous`.
        decay: Of v.

    Returns:
        The words (int32, as many as are sent); the new r; the new v (or None); and the
        number of elements that are not finite, as `pack_unambiguous` counts.
    """
    t = threshold if tf.is_tensor(threshold) else np.float32(threshold)
    r = _accumulate(residual, x)
    v = None if variance is None else _accumulate(variance, moments)
    magnitude = tf.abs(r)
    sent = magnitude > t
    if v is not None:
        sent &= r * r > alpha * v
    sign = tf.bitcast(r, tf.int32) & SIGN
    words, nonfinite = _words(sent, sign), _count_nonfinite(r, v)
    if v is not None:
        # A function would add constants first: (v + t^2) - 2 t |r|.
        square = tf.where(sent, t * t, 0)
        lower = tf.maximum((v - magnitude * (t + t)) + square, 0)
        v = tf.where(sent, lower, v) * decay
    r = tf.where(sent, tf.where(sign < 0, r + t, r - t), r)
    return words, r, v, nonfinite


def mean_of_sparse(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Returns the mean of N sparse vectors, added in the order of workers.

    Args:
        words: int32 `[N, n]`, sparse words.
        scale: float32 `[N, num_blocks]`.
        row_splits: The blocks.
        sizes: As in `sum_levels`.

    Returns:
        float32 `[count]`, 0 where no worker sent an element, or `SplitVector` of it.

    Raises:
        tf.errors.InvalidArgumentError: If words are out of order.
    """
    size, num_workers = row_splits[-1], words.shape[0]
    splits = tf.constant(row_splits[1:], tf.int32)
    # One element more, with a block of its own, takes what stands for nothing.
    index = _in_order(tf.minimum(words & ((1 << INDEX_BITS) - 1), size), size)
    scale = tf.pad(scale, [[0, 0], [0, 1]])
    d = tf.bitwise.right_shift(words, INDEX_BITS) & _MOST
    power = tf.bitcast(tf.bitwise.left_shift(127 - d, 23), tf.float32)
    total: tf.Tensor = None
    for i in range(num_workers):
        block = tf.searchsorted(splits, index[i], side="right")
        value = tf.gather(scale[i], block) * power[i]
        value = tf.where(words[i] < 0, -value, value)
        value = tf.math.unsorted_segment_sum(value, index[i], size + 1)
        total = value if total is None else add(total, value)
    return in_parts(divide(total[:size], num_workers), sizes)


def _in_order(index: tf.Tensor, size: int) -> tf.Tensor:
    """The indices of received words, `size` for nothing, where they are in order."""
    if in_xla():
        return index
    before, after = index[:, :-1], index[:, 1:]
    message = [
        "words must have increasing indices; words that stand for nothing come last. "
        "The sender or the network is faulty. Received: indices=",
        index,
        f"size={size}",
    ]
    is_valid = tf.reduce_all((before < after) | tf.equal(after, size))
    return checked(index, is_valid, message)


def _accumulate(gathered: tf.Tensor, x: Vector) -> tf.Tensor:
    """Adds what is new to what an element has gathered."""
    size = gathered.shape[0]
    if size >= 1 << INDEX_BITS:
        raise ValueError(
            f"A vector of sparse words has less than 2**{INDEX_BITS} elements; cut it "
            f"into several. Received: a vector of {size} elements"
        )
    return add(gathered, tf.convert_to_tensor(x))


def _words(sent: tf.Tensor, upper: tf.Tensor) -> tf.Tensor:
    """The words of what is sent, given the bits above their indices."""
    if in_xla():
        # Sizes are fixed there: a word for each element.
        return tf.where(sent, upper | tf.range(sent.shape[0]), NOTHING)
    index = tf.reshape(tf.where(sent), [-1])
    return tf.gather(upper, index) | tf.cast(index, tf.int32)


def _count_nonfinite(r: tf.Tensor, v: tf.Tensor | None) -> tf.Tensor:
    """Counts the elements of which either is infinite or NaN."""
    if v is None:
        return count_nonfinite(r)
    finite = tf.math.is_finite(r) & tf.math.is_finite(v)
    return tf.math.count_nonzero(tf.logical_not(finite))
