"""Keras' Adam with a frozen variance in some of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfgradcomp.compat.inner_optimizer import momenta, position, velocities
from tfgradcomp.compat.replace import replaced_by_replicas
from tfgradcomp.engine.update_rules import FusedStep, UpdateRule, adam_slots

_Adam = keras.optimizers.Adam


def is_plain_adam(optimizer: Any) -> bool:
    """Returns whether an optimizer is Adam or AdamW with Keras' step, not amsgrad."""
    return (
        isinstance(optimizer, _Adam)
        and type(optimizer).update_step is _Adam.update_step
        and not optimizer.amsgrad
    )


def replaced_update_step(
    optimizer: Any, update_step: Callable
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which an optimizer has another update step.

    It has its own again after the context, so that another wrapper of the same
    optimizer takes Keras' steps.

    Args:
        optimizer: A Keras optimizer.
        update_step: Function of a gradient, its variable and the learning rate.
    """
    return replaced_by_replicas(optimizer, "update_step", update_step)


def own_steps(
    optimizer: Any, count: Callable[[tf.Tensor], tf.Tensor]
) -> contextlib.AbstractContextManager[None]:
    r"""Returns a context in which Adam takes its own steps, between frozen ones.

    They differ from Keras' in the correction of \( v \), \( \sqrt{1 - \beta_2^k} \),
    where k is the number of gradients that v has averaged.

    Args:
        optimizer: Adam or AdamW.
        count: Function of the step counter, int64; returns the number of such steps,
            this step included.
    """

    def update_step(gradient, variable, learning_rate):
        given, m, v = _given_and_slots(optimizer, gradient, variable)
        by_gradient = ops.multiply(ops.subtract(given, m), 1 - optimizer.beta_1)
        optimizer.assign_add(m, by_gradient)
        squares = ops.subtract(ops.square(given), v)
        optimizer.assign_add(v, ops.multiply(squares, 1 - optimizer.beta_2))
        rate = _corrected(optimizer, learning_rate, variable.dtype, count)
        _descend(optimizer, variable, m, rate, ops.sqrt(v))

    return replaced_update_step(optimizer, update_step)


def frozen_variance(
    optimizer: Any, count: Callable[[tf.Tensor], tf.Tensor], floor: float
) -> contextlib.AbstractContextManager[None]:
    r"""Returns a context in which Adam's variance is frozen.

    A step takes the momentum in place of a gradient: it assigns \( m \) and leaves
    \( v \) as it is.

    Args:
        optimizer: Adam or AdamW.
        count: As for `own_steps`.
        floor: \( \sqrt v \) is at least this part of its root mean square over the
            variable.
    """

    def update_step(momentum, variable, learning_rate):
        given, m, v = _given_and_slots(optimizer, momentum, variable)
        optimizer.assign(m, given)
        rate = _corrected(optimizer, learning_rate, variable.dtype, count)
        _descend(optimizer, variable, given, rate, floored_root(v, floor))

    slots = adam_slots(optimizer)

    def coefficients():
        rate = _corrected(optimizer, optimizer.learning_rate, "float32", count)
        return tf.stack([rate, tf.constant(optimizer.epsilon, tf.float32)])

    def floor_of(variable):
        return least_root(slots[1][position(optimizer, variable)], floor)

    rule = UpdateRule("frozen_adam", slots, coefficients, floor_of)
    return replaced_update_step(optimizer, FusedStep(update_step, rule))


def _given_and_slots(optimizer, given, variable):
    index = position(optimizer, variable)
    given = ops.cast(given, variable.dtype)
    return given, momenta(optimizer)[index], velocities(optimizer)[index]


def _corrected(optimizer, learning_rate, dtype, count):
    """Returns the learning rate with the corrections of both moments."""
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)
    beta_1_power = ops.power(
        ops.cast(optimizer.beta_1, dtype), ops.cast(step + 1, dtype)
    )
    beta_2_power = ops.power(
        ops.cast(optimizer.beta_2, dtype), ops.cast(count(step), dtype)
    )
    rate = ops.cast(learning_rate, dtype)
    return rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power)


def _descend(optimizer, variable, momentum, rate, root):
    step = ops.divide(ops.multiply(momentum, rate), ops.add(root, optimizer.epsilon))
    optimizer.assign_sub(variable, step)


def floored_root(variance: Any, floor: float) -> tf.Tensor:
    """Returns the root of a variance, or `least_root` if larger."""
    return ops.maximum(ops.sqrt(variance), least_root(variance, floor))


def least_root(variance: Any, floor: float) -> tf.Tensor:
    """Returns `floor` of the root mean square of a variable with this variance."""
    return floor * ops.sqrt(ops.mean(variance))
