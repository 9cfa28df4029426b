"""Keras' Adam with a frozen variance in some of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfgradcomp.compat.inner_optimizer import momenta, position, velocities

_Adam = keras.optimizers.Adam


def is_plain_adam(optimizer: Any) -> bool:
    """Returns whether an optimizer is Adam or AdamW with Keras' step, not amsgrad."""
    return (
        isinstance(optimizer, _Adam)
        and type(optimizer).update_step is _Adam.update_step
        and not optimizer.amsgrad
    )


@contextlib.contextmanager
def replaced_update_step(optimizer: Any, update_step: Callable) -> Iterator[None]:
    """Gives an optimizer another update step.

    The optimizer has its own update step again after the context, so that another
    wrapper of the same optimizer takes Keras' steps.

    Args:
        optimizer: A Keras optimizer.
        update_step: Function of a gradient, its variable and the learning rate.
    """
    optimizer.update_step = update_step
    try:
        yield
    finally:
        # Replicas are threads, and each of them has set it: the first one removes it.
        # Keras applies an update once all of them have come to it.
        vars(optimizer).pop("update_step", None)


def frozen_variance(
    optimizer: Any,
    is_own_step: Callable[[tf.Tensor], tf.Tensor],
    count: Callable[[tf.Tensor], tf.Tensor],
    floor: float,
) -> contextlib.AbstractContextManager[None]:
    r"""Returns a context in which Adam's variance is frozen in some steps.

    A step with a frozen variance takes the momentum in place of a gradient: it assigns
    \( m \) and leaves \( v \) as it is. The other steps are Keras' own. In the
    correction of \( v \), \( \sqrt{1 - \beta_2^k} \), k is the number of gradients
    that v has averaged.

    Args:
        optimizer: Adam or AdamW.
        is_own_step: Function of the step counter, int64; True for Keras' own step.
        count: Function of the step counter; returns the number of Keras' own steps,
            this step included.
        floor: In other steps, \( \sqrt v \) is at least this part of its root mean
            square over the variable.
    """

    def update_step(gradient, variable, learning_rate):
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)
        is_own = is_own_step(step)
        given = ops.cast(gradient, dtype)
        index = position(optimizer, variable)
        m, v = momenta(optimizer)[index], velocities(optimizer)[index]
        by_gradient = m.value + ops.multiply(
            ops.subtract(given, m), 1 - optimizer.beta_1
        )
        squares = ops.subtract(ops.square(given), v)
        refreshed = v.value + ops.multiply(squares, 1 - optimizer.beta_2)
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
        root = ops.where(is_own, ops.sqrt(v), floored_root(v, floor))
        optimizer.assign_sub(
            variable,
            ops.divide(ops.multiply(m, alpha), ops.add(root, optimizer.epsilon)),
        )

    return replaced_update_step(optimizer, update_step)


def floored_root(variance: Any, floor: float) -> tf.Tensor:
    """Returns the root of a variance, or `floor` of its root mean square if larger."""
    return ops.maximum(ops.sqrt(variance), floor * ops.sqrt(ops.mean(variance)))
