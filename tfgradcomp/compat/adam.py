"""Keras' Adam, with a momentum instead of a gradient in some of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

_Adam = keras.optimizers.Adam


def is_plain_adam(optimizer: Any) -> bool:
    """Returns whether it is Adam or AdamW, by Keras' own step and without amsgrad."""
    return (
        isinstance(optimizer, _Adam)
        and type(optimizer).update_step is _Adam.update_step
        and not optimizer.amsgrad
    )


def momenta(optimizer: Any) -> list:
    """Returns the first moments, by the optimizer's variables."""
    return optimizer._momentums


def freeze_variance(
    optimizer: Any,
    is_own_step: Callable[[tf.Tensor], tf.Tensor],
    count: Callable[[tf.Tensor], tf.Tensor],
    floor: float,
) -> None:
    r"""Lets an optimizer take all but some of its steps with a given momentum.

    Those with \( m \leftarrow \) what is given, and \( v \) as it is; the others are
    Keras' own. In \( \sqrt{1 - \beta_2^k} \), the correction of v, k is the number of
    gradients that are in it.

    Args:
        optimizer: Any or AdamW.
        is_own_step: Function of the step counter, int64: whether it is Keras' own.
        count: Function of the same: the number of such steps, this one included.
        floor: In other steps \( \sqrt v \) is at least this part of its root mean
            square over the variable.
    """

    def update_step(gradient, variable, learning_rate):
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)
        is_own = is_own_step(step)
        given = ops.cast(gradient, dtype)
        index = optimizer._get_variable_index(variable)
        m, v = optimizer._momentums[index], optimizer._velocities[index]
        by_gradient = m + ops.multiply(ops.subtract(given, m), 1 - optimizer.beta_1)
        squares = ops.subtract(ops.square(given), v)
        refreshed = v + ops.multiply(squares, 1 - optimizer.beta_2)
        optimizer.assign(m, ops.where(is_own, by_gradient, given))
        optimizer.assign(v, ops.where(is_own, refreshed, v))
        beta_1_power = ops.power(
            ops.cast(optimizer.beta_1, dtype), ops.cast(step + 1, dtype)
        )
        beta_2_power = ops.power(
            ops.cast(optimizer.beta_2, dtype), ops.cast(count(step), dtype)
        )
        rate = ops.cast(learning_rate, dtype)
        alpha = rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power)
        root = ops.sqrt(v)
        least = floor * ops.sqrt(ops.mean(v))
        root = ops.where(is_own, root, ops.maximum(root, least))
        optimizer.assign_sub(
            variable,
            ops.divide(ops.multiply(m, alpha), ops.add(root, optimizer.epsilon)),
        )

    optimizer.update_step = update_step
