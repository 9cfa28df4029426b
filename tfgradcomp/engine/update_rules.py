"""The update steps of Keras' optimizers that a native operation can take."""

from __future__ import annotations

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


def rule_of(optimizer: Optimizer) -> str | None:
    """Returns the rule of `ops.apply_decoded` that is the optimizer's; None if none is.

    A subclass may change the step, so only Keras' own classes have a rule. The rule
    does not depend on the parts around the step: averages, constraints, and decay, for
    which there is `decays`.
    """
    kind = type(optimizer)
    if "update_step" in vars(optimizer):
        # `OneBitAdam` gives Adam another step.
        return None
    if kind is SGD:
        if not optimizer.momentum:
            return "sgd"
        return "nesterov" if optimizer.nesterov else "momentum"
    return "adam" if kind in (Adam, AdamW) and not optimizer.amsgrad else None


def coefficients(optimizer: Optimizer) -> tf.Tensor:
    """Returns the coefficients of the optimizer's rule for the step that it takes."""
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    if isinstance(optimizer, SGD):
        return tf.stack([rate, optimizer.momentum] if optimizer.momentum else [rate])
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
    optimizer: Optimizer, variables: list[keras.Variable]
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """Returns this replica's handles of variables and of the optimizer's slots.

    Returns:
        The handles of the variables; of the momenta, if any; of Adam's second moments,
        if any.
    """
    rule = rule_of(optimizer)
    slots: list = []
    if rule == "adam":
        slots = [momenta(optimizer), velocities(optimizer)]
    elif rule != "sgd":
        slots = [optimizer.momentums]
    positions = [position(optimizer, variable) for variable in variables]
    chosen = [[slot[p] for p in positions] for slot in slots]
    w, m, v = (
        [tensorflow_variable(one).handle for one in group]
        for group in (variables, *chosen, [], [])[:3]
    )
    return w, m, v
