"""The update steps of optimizers that a native operation can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf
from keras import ops
from keras.optimizers import SGD, Adam, AdamW, Optimizer

from tfgradcomp.compat.inner_optimizer import (
    decayed,
    momenta,
    position,
    tensorflow_variable,
    velocities,
)


class UpdateRule(NamedTuple):
    """A rule of `ops.apply_decoded`, for an optimizer.

    Attributes:
        name: The rule.
        slots: The optimizer's lists of variables that the rule needs.
        coefficients: Function of some variables; returns the rule's coefficients for
            the step that the optimizer takes with them.
    """

    name: str
    slots: tuple[list, ...]
    coefficients: Callable[[list[keras.Variable]], tf.Tensor]


class FusedStep:
    """An update step that a wrapper gives an optimizer, and that has a rule."""

    def rule(self) -> UpdateRule:
        """Returns the rule."""
        raise NotImplementedError


def rule_of(optimizer: Optimizer) -> UpdateRule | None:
    """Returns the rule of an optimizer's update step; None if it has none.

    A subclass may change the step, so only Keras' own classes have a rule, and steps
    that are a `FusedStep`. The rule does not depend on the parts around the step:
    averages, constraints, and decay, for which there is `decays`.
    """
    kind = type(optimizer)
    replaced = vars(optimizer).get("update_step")
    if replaced is not None:
        return replaced.rule() if isinstance(replaced, FusedStep) else None
    if kind is SGD:
        name = "nesterov" if optimizer.nesterov else "momentum"
        slots: tuple[list, ...] = (optimizer.momentums,)
        if not optimizer.momentum:
            name, slots = "sgd", ()
        return UpdateRule(name, slots, lambda _: _sgd_coefficients(optimizer))
    if kind in (Adam, AdamW) and not optimizer.amsgrad:
        slots = (momenta(optimizer), velocities(optimizer))
        return UpdateRule("adam", slots, lambda _: _adam_coefficients(optimizer))
    return None


def _sgd_coefficients(optimizer):
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    return tf.stack([rate, optimizer.momentum] if optimizer.momentum else [rate])


def _adam_coefficients(optimizer):
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    # The operations of Keras, for the same bits.
    local_step = ops.cast(optimizer.iterations + 1, "float32")
    beta_1_power = ops.power(ops.cast(optimizer.beta_1, "float32"), local_step)
    beta_2_power = ops.power(ops.cast(optimizer.beta_2, "float32"), local_step)
    alpha = rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power)
    rest = [1 - optimizer.beta_1, 1 - optimizer.beta_2, optimizer.epsilon]
    return tf.stack([alpha, *(tf.constant(one, tf.float32) for one in rest)])


def decays(optimizer: Optimizer, variables: list[keras.Variable]) -> tf.Tensor:
    """Returns the `decays` of `ops.apply_decoded` for some variables."""
    if not optimizer.weight_decay:
        return tf.zeros([0])
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    each = [
        0.0 if variable is None else optimizer.weight_decay
        for variable in decayed(optimizer, variables)
    ]
    return tf.stack([rate, *each])


def handles(
    optimizer: Optimizer, rule: UpdateRule, variables: list[keras.Variable]
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """Returns this replica's handles of variables and of the optimizer's slots.

    Returns:
        The handles of the variables; of the momenta, if any; of Adam's second moments,
        if any.
    """
    positions = [position(optimizer, variable) for variable in variables]
    chosen = [[slot[p] for p in positions] for slot in rule.slots]
    w, m, v = (
        [tensorflow_variable(one).handle for one in group]
        for group in (variables, *chosen, [], [])[:3]
    )
    return w, m, v
