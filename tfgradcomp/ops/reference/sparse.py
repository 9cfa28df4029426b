"""Sparse words: single elements, each with its sign, its magnitude and its index.

The word of element j is its sign (the top bit), d in three bits and j in the lowest
`INDEX_BITS`. It stands for +-scale * 2^-d, with the scale of j's block. The words of a
worker are in the order of j. `NOTHING`, like any word whose index is beyond the vector,
stands for no element. Such words come last. Inside XLA, each element has a word, and
they come anywhere.

An element accumulates its terms in r, and their squares in v, until it is sent. The
formulas use r and v after this step's terms were added. Each product and each sum is
rounded to float32 before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    exponent,
    mean_of_workers,
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

    r += x, v += moments. An element is selected if r^2 > alpha v and r is a normal
    number. Let e be the exponent of the largest |r| selected in a block, floor(log2
    max|r|). A selected |r| is rounded to the nearer power of two, the larger of two
    equally near, but to 2^e at most. That is 2^(e - d), and it is sent if d <= 7. Then
    r = v = 0 for the elements sent, v = decay v for the others.

    Args:
        moments: The squares that v accumulates, float32 `[count]`.
        residual: r.
        variance: v.

    Returns:
        The words of the elements sent (int32); e of each block (int8, -128 if nothing
        is sent); the new r; the new v; and the number of elements whose r or v, before
        the sending, is infinite or NaN (int64).
    """
    r, v = _accumulate(residual, x), _accumulate(variance, moments)
    bits = tf.bitcast(r, tf.int32)
    magnitude = bits & ~SIGN
    selected = (magnitude >= _NORMAL) & (magnitude < _INFINITE) & (r * r > alpha * v)
    top = tf.where(selected, magnitude, 0)
    top = exponent(reduce_blocks(top, row_splits, tf.maximum))
    # Adding 1 to the top bit of the mantissa carries where r is to be rounded up.
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
    threshold: tf.Tensor,
    alpha: float,
    decay: float,
    row_splits: Sequence[int],
):
    """Packs the signs of the elements that have accumulated more than a threshold t.

    Each block has its own t. r += x, v += moments. An element is sent if |r| > t and
    r^2 > alpha v. Then, for the elements sent, v = max((v - 2 t |r|) + t^2, 0) and
    r = r - sign(r) t. v = decay v for all elements. Words have d = 0.

    Args:
        moments: As in `pack_unambiguous`. None, as `variance`: there is no v, and an
            element is sent if |r| > t.
        residual: r.
        variance: v, or None.
        threshold: t of each block, positive, float32 `[num_blocks]`.

    Returns:
        The words of the elements sent (int32); the new r; the new v (or None); and the
        number of elements that are not finite, as `pack_unambiguous` counts it.
    """
    t = spread(tf.convert_to_tensor(threshold, tf.float32), row_splits)
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

    `words` are sparse words, `scale` is float32 `[N, num_blocks]`. An element that no
    worker sent is 0.

    Raises:
        tf.errors.InvalidArgumentError: If words are out of order.
    """
    size = row_splits[-1]
    splits = tf.constant(row_splits[1:], tf.int32)
    # Words that stand for no element go to an additional element and block.
    index = _in_order(tf.minimum(words & ((1 << INDEX_BITS) - 1), size), size)
    scale = tf.pad(scale, [[0, 0], [0, 1]])
    d = tf.bitwise.right_shift(words, INDEX_BITS) & _MOST
    power = tf.bitcast(tf.bitwise.left_shift(127 - d, 23), tf.float32)

    def decode(words, scale, index, power):
        block = tf.searchsorted(splits, index, side="right")
        value = tf.gather(scale, block) * power
        value = tf.where(words < 0, -value, value)
        return tf.math.unsorted_segment_sum(value, index, size + 1)[:size]

    return mean_of_workers(decode, [words, scale, index, power], sizes)


def _in_order(index: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the indices of received words after a check of their order.

    A word that stands for no element has the index `size`.
    """
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


def _accumulate(accumulated: tf.Tensor, x: Vector) -> tf.Tensor:
    """Adds this step's terms to the accumulated ones."""
    size = accumulated.shape[0]
    if size >= 1 << INDEX_BITS:
        raise ValueError(
            f"A vector of sparse words has less than 2**{INDEX_BITS} elements; cut it "
            f"into several. Received: a vector of {size} elements"
        )
    return add(accumulated, tf.convert_to_tensor(x))


def _words(sent: tf.Tensor, upper: tf.Tensor) -> tf.Tensor:
    """Returns the words of the elements sent, from the bits above their indices."""
    if in_xla():
        # Sizes are static there: a word for each element.
        return tf.where(sent, upper | tf.range(sent.shape[0]), NOTHING)
    index = tf.reshape(tf.where(sent), [-1])
    return tf.gather(upper, index) | tf.cast(index, tf.int32)


def _count_nonfinite(r: tf.Tensor, v: tf.Tensor | None) -> tf.Tensor:
    """Counts the elements whose r or v is infinite or NaN."""
    if v is None:
        return count_nonfinite(r)
    finite = tf.math.is_finite(r) & tf.math.is_finite(v)
    return tf.math.count_nonzero(tf.logical_not(finite))
