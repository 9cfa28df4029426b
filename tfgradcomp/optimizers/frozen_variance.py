"""Keras' Adam with a frozen variance in some of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from typing_extensions import override

from tfgradcomp.compat.inner_optimizer import momenta, position, velocities
from tfgradcomp.engine.update_rules import FusedStep, UpdateRule

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

    return replaced_update_step(optimizer, FrozenStep(optimizer, count, floor))


class FrozenStep(FusedStep):
    """The step of Adam with a frozen variance; for the arguments see there."""

    def __init__(
        self, optimizer: Any, count: Callable[[tf.Tensor], tf.Tensor], floor: float
    ):
        self._optimizer, self._count, self._floor = optimizer, count, floor

    def __call__(self, momentum, variable, learning_rate):
        """Takes the step with Keras' operations, as `update_step` of the optimizer."""
        given, m, v = _given_and_slots(self._optimizer, momentum, variable)
        self._optimizer.assign(m, given)
        rate = _corrected(self._optimizer, learning_rate, variable.dtype, self._count)
        _descend(self._optimizer, variable, given, rate, floored_root(v, self._floor))

    @override
    def rule(self):
        slots = (momenta(self._optimizer), velocities(self._optimizer))
        return UpdateRule("frozen_adam", slots, self._coefficients)

    def _coefficients(self, variables):
        inner = self._optimizer
        rate = _corrected(inner, inner.learning_rate, "float32", self._count)
        floors = [
            least_root(velocities(inner)[position(inner, variable)], self._floor)
            for variable in variables
        ]
        return tf.stack([rate, tf.constant(inner.epsilon, tf.float32), *floors])


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
