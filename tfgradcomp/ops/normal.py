"""Gaussian noise of whole numbers and a table: the same bits on every machine."""

from __future__ import annotations

import functools
import math
import statistics

import numpy as np
import tensorflow as tf

from tfgradcomp import ops

_HALF_BITS = 16


def gaussian(stream: tf.Tensor, count: int) -> tf.Tensor:
    r"""Returns standard normal numbers, float32 `[count]`.

    An element is \( (q_a + q_b) / \sqrt 2 \), where a and b are the halves of its
    random word and \( q_k \) is the quantile of \( (k + 1/2) / 2^{16} \). Logarithms
    and cosines would differ between processors in the last bit, and so would weights.

    Args:
        stream: As `Context.random_stream` returns it.
        count: Number of elements.
    """
    words = ops.random_bits(stream, count)
    low = words & (2**_HALF_BITS - 1)
    high = tf.bitwise.right_shift(words, tf.constant(_HALF_BITS, words.dtype))
    table = tf.constant(_scaled_quantiles())
    halves = [tf.gather(table, tf.cast(half, tf.int32)) for half in (low, high)]
    return halves[0] + halves[1]


@functools.cache
def _scaled_quantiles() -> np.ndarray:
    """Returns the quantiles over the square root of 2, rounded alike everywhere."""
    count = 2**_HALF_BITS
    normal = statistics.NormalDist(0, math.sqrt(0.5))
    upper = [normal.inv_cdf((k + 0.5) / count) for k in range(count // 2, count)]
    half = np.round(np.array(upper) * 2**20) / 2**20
    return np.concatenate([-half[::-1], half]).astype(np.float32)
