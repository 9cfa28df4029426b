"""Keras' optimizers: variables and settings that have no public name to read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.replace import replace
from tfgradcomp.compat.strategy import first_values_unsent, is_multi_worker

# Not there before Keras 3.15.
MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())


def forget_variables(optimizer: Optimizer) -> None:
    """Removes the variables that Keras' constructor gives to a wrapping optimizer."""
    for name in (
        "_iterations",
        "_learning_rate",
        "_trainable_variables",
        "_trainable_variables_indices",
    ):
        del vars(optimizer)[name]


def create_without_exchange() -> None:
    """Makes Keras' optimizers begin with the counter and the rate of their worker.

    Keras has those of the first worker sent to all. Workers whose scripts create other
    optimizers would wait for each other before their settings can be compared. Momenta
    that begin with zeros are not sent either: for Adam they are twice the model.
    """
    replace(Optimizer, "__init__", _create)
    replace(Optimizer, "add_variable", _add_variable)


def _create(original, optimizer, *args, **kwargs):
    with _unsent():
        original(optimizer, *args, **kwargs)


def _add_variable(original, optimizer, shape, initializer="zeros", *args, **kwargs):
    initializer = keras.initializers.get(initializer)
    is_known = isinstance(initializer, keras.initializers.Zeros)
    with _unsent() if is_known else contextlib.nullcontext():
        return original(optimizer, shape, initializer, *args, **kwargs)


def _unsent():
    strategy = tf.distribute.get_strategy()
    is_shared = is_multi_worker(strategy)
    return first_values_unsent(strategy) if is_shared else contextlib.nullcontext()


def filtered(
    optimizer: Optimizer, gradients: list, variables: list
) -> tuple[list, list]:
    """Drops variables without a gradient, as Keras does, with Keras' warning.

    Keras does so within `apply` only.

    Raises:
        ValueError: If the optimizer was not built with all of the variables, or if
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


def tensorflow_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns the TensorFlow variable that holds the values of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def position(optimizer: Optimizer, variable: keras.Variable) -> int:
    """Returns the index of a variable among those that the optimizer was built with."""
    return optimizer._get_variable_index(variable)


def positions(optimizer: Optimizer, variables: Iterable) -> frozenset[int]:
    """Returns the indices of variables, as `position` does of a single one."""
    return frozenset(position(optimizer, variable) for variable in variables)


def strategy_of(optimizer: Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy that the optimizer was created under."""
    return optimizer._distribution_strategy


def trainable_variables(optimizer: Optimizer) -> list:
    """Returns the variables that the optimizer was built with."""
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
    """Returns the variables, None for each that is excluded from weight decay."""
    # Keras compares the names of TensorFlow's variables, which end in ":0".
    return [
        variable if optimizer._use_weight_decay(tensorflow_variable(variable)) else None
        for variable in variables
    ]


def momenta(optimizer: Optimizer) -> list:
    """Returns Adam's first moments, in the order of the variables."""
    return optimizer._momentums


def velocities(optimizer: Optimizer) -> list:
    """Returns Adam's second moments, in the order of the variables."""
    return optimizer._velocities


def members(optimizer: Optimizer) -> list:
    """Returns the optimizers in a `MultiOptimizer`, or else the optimizer itself."""
    is_multi = isinstance(optimizer, MULTI_OPTIMIZER)
    return optimizer.optimizers if is_multi else [optimizer]


def member_indices(optimizer: Optimizer, variables: list) -> list[int]:
    """Returns, for variables of a `MultiOptimizer`, the index of each one's member."""
    indices = optimizer._var_to_optimizer_idx
    return [indices[optimizer._var_key(variable)] for variable in variables]


def momentum_of(optimizer: Optimizer) -> tuple[str, float]:
    """Returns name and value of the argument that decays a momentum; "", 0 if none."""
    for member in members(optimizer):
        for name in ("momentum", "beta_1"):
            if value := getattr(member, name, 0):
                return name, value
    return "", 0.0


def remove_momentum(optimizer: keras.optimizers.SGD) -> None:
    """Makes momentum SGD plain SGD, without the variables of the momentum.

    Keras has no public way to take a variable from an optimizer.
    """
    optimizer.momentum, optimizer.nesterov = 0.0, False
    if optimizer.built:
        dropped = {id(velocity) for velocity in optimizer.momentums}
        kept = [v for v in optimizer._variables if id(v) not in dropped]
        optimizer._variables[:] = kept
        optimizer.momentums = []


def refuse_wrappers_in_multi_optimizer(message: str) -> None:
    """Makes `MultiOptimizer` raise a ValueError with `message` if it gets a wrapper."""

    def checked(original, optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        if any(hasattr(member, "inner_optimizer") for member in members(optimizer)):
            names = [type(member).__name__ for member in members(optimizer)]
            raise ValueError(f"{message} Received: optimizers={names}")

    if MULTI_OPTIMIZER:
        replace(MULTI_OPTIMIZER, "__init__", checked)
        # A function that chooses optimizers is first called there.
        replace(MULTI_OPTIMIZER, "build", checked)


def show_through_loss_scale(kind: type[Optimizer]) -> None:
    """Makes a `LossScaleOptimizer` answer with the attributes of a `kind` inside it.

    `compile` puts it around an optimizer by itself, and it forwards a few names only.
    """

    def attribute(scaler, name):
        inner = vars(scaler).get("inner_optimizer")
        if name.startswith("_") or not isinstance(inner, kind):
            raise AttributeError(
                f"{type(scaler).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    # Python asks it for names that are not found otherwise.
    setattr(keras.optimizers.LossScaleOptimizer, "__getattr__", attribute)  # noqa: B010
