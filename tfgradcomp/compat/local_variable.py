"""Variables of this process alone."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def local_zeros(shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    """Creates a variable of zeros on the CPU, outside of any graph and strategy.

    `tf.Variable` has no such option: under a strategy it becomes a variable of the
    strategy, whose copies are kept equal.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(tf.zeros(shape, dtype), trainable=False)
