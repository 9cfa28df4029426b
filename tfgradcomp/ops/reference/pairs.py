"""Single elements of a vector: the largest, cleared ones, and vectors of few elements.

An index below 0, such as `NOTHING`, stands for no element.
"""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.vectors import SIGN, divide


def find_largest(x: Vector, count: tf.Tensor | int) -> tf.Tensor:
    """Returns the indices of the elements of largest magnitude, ascending.

    Of equal magnitudes the first are taken. A NaN is larger than all numbers.

    Args:
        x: float32, less than 2**31 elements.
        count: int32 scalar, at most the number of elements.

    Returns:
        int32 `[count]`.
    """
    # Bits of numbers that are not negative are in the order of the numbers.
    magnitude = tf.bitcast(tf.convert_to_tensor(x), tf.int32) & ~SIGN
    return tf.sort(tf.math.top_k(magnitude, count).indices)


def clear_elements(x: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns a vector with zeros at some indices.

    Args:
        x: float32 `[size]`.
        indices: int32 `[any]`.
    """
    places, is_element = _places(indices)
    is_cleared = tf.scatter_nd(places, tf.cast(is_element, tf.int32), tf.shape(x))
    return tf.where(is_cleared > 0, 0.0, x)


def mean_of_pairs(indices: tf.Tensor, values: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the mean of N vectors of few elements, added in the order of workers.

    Args:
        indices: int32 `[N, any]`, different ones of each worker.
        values: float32 `[N, any]`, of these elements; the others are 0.
        count: Elements of a vector.

    Returns:
        float32 `[count]`.
    """
    total = tf.zeros([count])
    # One after the other, since a GPU adds what goes to one place in any order.
    for row, numbers in zip(tf.unstack(indices), tf.unstack(values), strict=True):
        places, is_element = _places(row)
        sent = tf.where(is_element, numbers, 0.0)
        total = tf.tensor_scatter_nd_add(total, places, sent)
    return divide(total, indices.shape[0])


def _places(indices):
    """Returns where to scatter, and which indices are of an element."""
    return tf.maximum(indices, 0)[:, tf.newaxis], indices >= 0
