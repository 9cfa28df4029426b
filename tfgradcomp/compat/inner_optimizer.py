"""Keras' optimizers: variables and settings without a public name."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.replace import replace

# Not there before Keras 3.15.
MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())


def forget_variables(optimizer: Optimizer) -> None:
    """Removes the variables of an optimizer that wraps another one.

    Keras' constructor creates them, without an option; the inner optimizer has its own.
    """
    for name in (
        "_iterations",
        "_learning_rate",
        "_trainable_variables",
        "_trainable_variables_indices",
    ):
        del vars(optimizer)[name]


def filtered(
    optimizer: Optimizer, gradients: list, variables: list
) -> tuple[list, list]:
    """Drops variables without a gradient, as Keras does, with Keras' warning.

    Keras does so within `apply` only.

    Raises:
        ValueError: If the optimizer was not built with one of the variables, or if
            there is no gradient at all.
    """
    optimizer._check_variables_are_known(variables)
    gradients, variables = optimizer._filter_empty_gradients(gradients, variables)
    return optimizer._overwrite_variables_directly_with_gradients(gradients, variables)


def is_overwritten(optimizer: Optimizer, variable: keras.Variable) -> bool:
    """Returns whether Keras assigns the gradient to the variable (float8 scales).

    The public `overwrite_with_gradient` is missing in variables of TensorFlow.
    """
    return optimizer._overwrite_variable_with_gradient(variable)


def position(optimizer: Optimizer, variable: keras.Variable) -> int:
    """Returns the index of a variable among those that the optimizer was built with.

    Keras has no public access to the order.
    """
    return optimizer._get_variable_index(variable)


def strategy_of(optimizer: Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy that the optimizer was created under.

    Keras does not show it.
    """
    return optimizer._distribution_strategy


def trainable_variables(optimizer: Optimizer) -> list:
    """Returns the variables that the optimizer was built with.

    The public `variables` are the optimizer's own.
    """
    return optimizer._trainable_variables


def track(optimizer: Optimizer, variables: list) -> None:
    """Adds variables to those that Keras saves and counts as the optimizer's.

    The public `add_variable` creates the variable itself.
    """
    for variable in variables:
        optimizer._track_variable(variable)


def step_counter(optimizer: Optimizer) -> keras.Variable:
    """Returns the variable that counts calls of `apply`.

    The public `iterations` divides it by the accumulation steps.
    """
    return optimizer._iterations


def decayed(optimizer: Optimizer, variables: list) -> list:
    """Returns the variables, None for each that is excluded from weight decay.

    The public `exclude_from_weight_decay` only writes the exclusions.
    """
    return [v if optimizer._use_weight_decay(v) else None for v in variables]


def momenta(optimizer: Optimizer) -> list:
    """Returns Adam's first moments, in the order of the variables.

    Keras gives them no public name, other than SGD's `momentums`.
    """
    return optimizer._momentums


def velocities(optimizer: Optimizer) -> list:
    """Returns Adam's second moments, in the order of the variables.

    Keras gives them no public name.
    """
    return optimizer._velocities


def members(optimizer: Optimizer) -> list:
    """Returns the optimizers in a `MultiOptimizer`; of any other one, itself.

    Keras has the class since 3.15 only.
    """
    return (
        optimizer.optimizers if isinstance(optimizer, MULTI_OPTIMIZER) else [optimizer]
    )


def member_indices(optimizer: Optimizer, variables: list) -> list[int]:
    """Returns for each variable the index of the member that trains it.

    A `MultiOptimizer` does not show how it has divided the variables.
    """
    indices = optimizer._var_to_optimizer_idx
    return [indices[optimizer._var_key(variable)] for variable in variables]


def refuse_wrappers_in_multi_optimizer(message: str) -> None:
    """Makes `MultiOptimizer` raise ValueError if it is given a wrapper.

    Keras has no public hook in its construction.

    Args:
        message: The beginning of the error's message.
    """

    def checked(original, optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        if any(hasattr(member, "inner_optimizer") for member in members(optimizer)):
            names = [type(member).__name__ for member in members(optimizer)]
            raise ValueError(f"{message} Received: optimizers={names}")

    if MULTI_OPTIMIZER:
        replace(MULTI_OPTIMIZER, "__init__", checked)
        # A function that chooses optimizers is first called there.
        replace(MULTI_OPTIMIZER, "build", checked)
