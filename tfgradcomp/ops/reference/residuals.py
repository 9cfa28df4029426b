"""Sums of gradients and residuals, and residuals that are rounded at random."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.random_numbers import random_bits
from tfgradcomp.ops.reference.vectors import add, length


def add_scaled(x: Vector, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    r"""Returns \( x + factor \cdot y \), float32 `[count]`, each operation rounded.

    Args:
        x: float32 `[count]`.
        y: float32 `[count]`.
        factor: float32 scalar.
    """
    return add(tf.convert_to_tensor(x), factor * y)


def round_to_bfloat16(x: tf.Tensor, stream: tf.Tensor) -> tf.Tensor:
    """Rounds float32 `[count]` to a neighbour in bfloat16, at random and unbiased.

    An element is rounded away from zero where its lower 16 bits plus the top 16 of its
    `random_bits` carry, which has the probability of the lower bits over 2**16. Numbers
    that bfloat16 has stay as they are.
    """
    shift = tf.constant(16, tf.uint32)
    noise = tf.bitwise.right_shift(random_bits(stream, length(x)), shift)
    rounded = tf.bitwise.right_shift(tf.bitcast(x, tf.uint32) + noise, shift)
    return tf.bitcast(tf.cast(rounded, tf.uint16), tf.bfloat16)
