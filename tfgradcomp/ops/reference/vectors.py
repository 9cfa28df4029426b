"""Helpers of all references: parts of a vector, and arithmetic that graphs keep."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.core.split_vector import SplitVector, Vector

SIGN = -(2**31)  # The sign's bit.


def add(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Adds two float32 tensors in a way that a graph does not reorder.

    Inside functions TensorFlow changes the order of a sum of sums, a + (b + c). This
    function computes a - (-b) instead, which has the same bits as a + b. The sign is
    flipped by its bit, because TensorFlow would simplify a Neg.
    """
    return a - tf.bitcast(tf.bitcast(b, tf.int32) ^ SIGN, tf.float32)


def mean_of_workers(
    decode: Callable[..., tf.Tensor],
    tensors: Sequence[tf.Tensor],
    sizes: Sequence[int] | None,
) -> Vector:
    """Returns the mean of N decoded vectors, added in the order of workers.

    Args:
        decode: Function from the tensors of a worker to float32 `[count]`.
        tensors: Tensors with a leading axis of workers.
        sizes: As in `in_parts`.
    """
    workers = zip(*map(tf.unstack, tensors), strict=True)
    total = functools.reduce(add, itertools.starmap(decode, workers))
    return in_parts(divide(total, tensors[0].shape[0]), sizes)


def exponent(magnitude: tf.Tensor) -> tf.Tensor:
    """Returns the exponent field of non-negative numbers from their bits."""
    return tf.bitwise.right_shift(magnitude, 23)


def in_parts(values: tf.Tensor, sizes: Sequence[int] | None) -> Vector:
    """Cuts a vector into a `SplitVector` of the given sizes; None: it stays whole."""
    return values if sizes is None else SplitVector(tf.split(values, sizes))


def zero_padded(vector: tf.Tensor, size: int) -> tf.Tensor:
    """Returns a vector with zeros behind it, up to `size` elements."""
    return tf.pad(vector, [[0, size - vector.shape[0]]])


def count_nonfinite(x: tf.Tensor) -> tf.Tensor:
    """Counts the elements that are infinite or NaN, int64."""
    return tf.math.count_nonzero(tf.logical_not(tf.math.is_finite(x)))


def first_nonfinite(x: Vector, is_finite: tf.Tensor) -> tf.Tensor:
    """Returns which of the tensors of a vector is the first with NaN or infinity.

    Args:
        x: float32, of any shapes.
        is_finite: Boolean scalar: whether there is known to be none; nothing is read.

    Returns:
        The tensor's index, an int32 scalar; the number of tensors if there is none.
    """
    tensors, scale = (x.tensors, x.scale) if isinstance(x, SplitVector) else ([x], 1.0)

    def search():
        scaled = [tensor if scale == 1 else tensor * scale for tensor in tensors]
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(t)) for t in scaled])
        return tf.reduce_min(tf.where(finite, len(tensors), tf.range(len(tensors))))

    return tf.cond(is_finite, lambda: tf.constant(len(tensors)), search)


def length(x: tf.Tensor) -> int:
    """Returns the number of elements of a vector; a tensor if it varies."""
    return tf.size(x) if x.shape[0] is None else x.shape[0]


def divide(x: tf.Tensor, divisor: np.ndarray | int) -> tf.Tensor:
    """Divides by numbers other than 0, in a way that a graph does not change."""
    # Inside functions TensorFlow turns `x / constant` into x * (1 / constant), whose
    # last bit may differ.
    return tf.math.divide_no_nan(x, tf.cast(divisor, x.dtype))
