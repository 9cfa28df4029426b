"""The update steps of optimizers that a native operation can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
        coefficients: Returns the coefficients of the step that the optimizer takes.
        floor: Function of a variable that returns its floor; None if the rule has none.
    """

    name: str
    slots: tuple[list, ...]
    coefficients: Callable[[], tf.Tensor]
    floor: Callable[[keras.Variable], tf.Tensor] | None = None


@dataclass(frozen=True)
class FusedStep:
    """An update step that a wrapper gives an optimizer, and its rule.

    Attributes:
        update_step: As the optimizer's, by Keras' operations.
        rule: The rule.
    """

    update_step: Callable
    rule: UpdateRule

    def __call__(self, *args: Any) -> None:
        """Takes the step by Keras' operations."""
        self.update_step(*args)


def rule_of(optimizer: Optimizer) -> UpdateRule | None:
    """Returns the rule of an optimizer's update step; None if it has none.

    A subclass may change the step, so only Keras' own classes have a rule, and steps
    that are a `FusedStep`. The rule does not depend on the parts around the step:
    averages, constraints, and decay, for which there is `decays`.
    """
    kind = type(optimizer)
    replaced = vars(optimizer).get("update_step")
    if replaced is not None:
        return replaced.rule if isinstance(replaced, FusedStep) else None
    if kind is SGD:
        coefficients = partial(_sgd_coefficients, optimizer)
        if not optimizer.momentum:
            return UpdateRule("sgd", (), coefficients)
        name = "nesterov" if optimizer.nesterov else "momentum"
        return UpdateRule(name, (optimizer.momentums,), coefficients)
    if kind in (Adam, AdamW) and not optimizer.amsgrad:
        coefficients = partial(_adam_coefficients, optimizer)
        return UpdateRule("adam", adam_slots(optimizer), coefficients)
    return None


def adam_slots(optimizer: Adam) -> tuple[list, list]:
    """Returns the slots of the rules for Adam: both moments."""
    return momenta(optimizer), velocities(optimizer)


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


def targets(
    optimizer: Optimizer,
    rule: UpdateRule,
    groups: Iterable[tuple[list[keras.Variable], list[int]]],
) -> list[tuple]:
    """Returns what `ops.apply_decoded` takes after the vector, for this step.

    Args:
        optimizer: The optimizer.
        rule: Its rule.
        groups: The variables of each vector, and where in them its pieces begin.
    """
    common, found = rule.coefficients(), []
    for variables, offsets in groups:
        floors = [rule.floor(variable) for variable in variables] if rule.floor else []
        found.append(
            (
                tf.concat([common, floors], 0) if floors else common,
                _handles(optimizer, rule, variables),
                offsets,
                rule.name,
                _decays(optimizer, variables),
            )
        )
    return found


def _decays(optimizer, variables):
    """Returns a rate and the decay of each variable; nothing if none decays."""
    if not optimizer.weight_decay:
        return tf.zeros([0])
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    each = [
        0.0 if variable is None else optimizer.weight_decay
        for variable in decayed(optimizer, variables)
    ]
    return tf.stack([rate, *each])


def _handles(optimizer, rule, variables):
    """Returns this replica's handles: of variables, and of two slots or fewer."""
    positions = [position(optimizer, variable) for variable in variables]
    chosen = [[slot[p] for p in positions] for slot in rule.slots]
    w, m, v = (
        [tensorflow_variable(one).handle for one in group]
        for group in (variables, *chosen, [], [])[:3]
    )
    return w, m, v
