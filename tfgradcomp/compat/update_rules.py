"""The update steps of Keras' optimizers that a native operation can take."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import ops
from keras.optimizers import SGD, Adam, AdamW, Optimizer

from tfgradcomp.compat.inner_optimizer import position


def rule_of(optimizer: Optimizer) -> str | None:
    """Returns the rule of `ops.apply_decoded` that is the optimizer's; None: no one.

    A subclass may do anything, so that Keras' own classes alone have a rule. What they
    do before and after the step itself (decay, averages, constraints) is no matter.
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
    # The words of Keras, for the same bits.
    local_step = ops.cast(optimizer.iterations + 1, "float32")
    beta_1_power = ops.power(ops.cast(optimizer.beta_1, "float32"), local_step)
    beta_2_power = ops.power(ops.cast(optimizer.beta_2, "float32"), local_step)
    alpha = rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power)
    rest = [1 - optimizer.beta_1, 1 - optimizer.beta_2, optimizer.epsilon]
    return tf.stack([alpha, *(tf.constant(one, tf.float32) for one in rest)])


def handles(
    optimizer: Optimizer, variables: list[keras.Variable]
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """Returns this replica's handles of variables, and of what the rule keeps of them.

    Returns:
        Those of the variables; of the momenta, if any; of Adam's second moments, if
        any.
    """
    names = {"sgd": (), "adam": ("_momentums", "_velocities")}
    kept = names.get(rule_of(optimizer) or "", ("momentums",))
    positions = [position(optimizer, variable) for variable in variables]
    slots = [[getattr(optimizer, name)[p] for p in positions] for name in kept]
    w, m, v = (
        [getattr(one, "value", one).handle for one in group]
        for group in (variables, *slots, [], [])[:3]
    )
    return w, m, v
