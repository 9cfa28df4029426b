"""Helpers of all families: parts of a vector, and sums that graphs leave alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.core.split_vector import SplitVector, Vector

SIGN = -(2**31)  # The sign's bit.


def add(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Adds two float32 tensors: a sum that stays one of its own.

    Inside functions TensorFlow adds up a sum of sums, a + (b + c), in an order of its
    own. Where the order counts, that of workers or of terms, a - (-b) stands for a + b:
    the same bits. A Neg would not do, as TensorFlow knows what that means.
    """
    return a - tf.bitcast(tf.bitcast(b, tf.int32) ^ SIGN, tf.float32)


def exponent(magnitude: tf.Tensor) -> tf.Tensor:
    """Returns the exponent field of non-negative numbers, of their bits."""
    return tf.bitwise.right_shift(magnitude, 23)


def in_parts(values: tf.Tensor, sizes: Sequence[int] | None) -> Vector:
    """Cuts a vector into `SplitVector` of the given sizes; None: it stays whole."""
    return values if sizes is None else SplitVector(tf.split(values, sizes))


def count_nonfinite(x: tf.Tensor) -> tf.Tensor:
    """Counts the elements that are infinite or NaN, int64."""
    return tf.math.count_nonzero(tf.logical_not(tf.math.is_finite(x)))


def length(x: tf.Tensor) -> int:
    """Returns the number of elements of a vector; a tensor if it varies."""
    return tf.size(x) if x.shape[0] is None else x.shape[0]


def divide(x: tf.Tensor, divisor: np.ndarray | int) -> tf.Tensor:
    """Divides by numbers that are no 0."""
    # Inside functions TensorFlow turns `x / constant` into x * (1 / constant), whose
    # last bit may differ. This division it leaves as it is.
    return tf.math.divide_no_nan(x, tf.cast(divisor, x.dtype))
