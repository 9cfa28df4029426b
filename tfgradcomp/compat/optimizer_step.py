"""The parts of a Keras optimizer's step, each without a public name.

Keras runs them as one within `apply`.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.inner_optimizer import position
from tfgradcomp.compat.replace import replace


def replace_update(function: Callable) -> None:
    """Makes optimizers apply gradients by a function, from decay to averages.

    The public `apply` also clips, and `update_step` is of one variable.

    Args:
        function: Called as `function(original, optimizer, gradients, variables)`.
    """
    replace(Optimizer, "_backend_apply_gradients", function)


def replace_learning_rate(function: Callable) -> None:
    """Makes optimizers read their learning rate by a function.

    The public `learning_rate` must not be set within a graph.

    Args:
        function: Called as `function(original, optimizer)`.
    """
    replace(Optimizer, "_get_current_learning_rate", function)


def replace_gradient_sum(function: Callable) -> None:
    """Makes optimizers add up the gradients of replicas by a function.

    Keras has no option to leave the sum out.

    Args:
        function: Called as `function(original, optimizer, gradients_and_variables)`.
    """
    replace(Optimizer, "_all_reduce_sum_gradients", function)


def has_own_clipping(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's class clips in another way than Keras.

    Clipping has no public method.
    """
    return type(optimizer)._clip_gradients is not Optimizer._clip_gradients


def clip_gradients(optimizer: Optimizer, gradients: list) -> list:
    """Applies `clipnorm`, `clipvalue` or `global_clipnorm`.

    Clipping has no public method.
    """
    return optimizer._clip_gradients(gradients)


def accumulated_gradients(optimizer: Optimizer) -> list:
    """Returns the variables of accumulated gradients, which have no public name."""
    return getattr(optimizer, "_accumulated_gradients", None) or []


def accumulators_of(optimizer: Optimizer, variables: list) -> list:
    """Returns the accumulated gradients of some variables."""
    everything = accumulated_gradients(optimizer)
    return [everything[position(optimizer, variable)] for variable in variables]


def add_to_accumulators(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Adds gradients to the accumulated gradients.

    Keras does so within `apply` only.
    """
    accumulators = accumulators_of(optimizer, variables)
    optimizer._backend_increment_gradient_accumulators(gradients, accumulators)


def reset_accumulators(optimizer: Optimizer) -> None:
    """Sets the accumulated gradients to zero.

    Keras does so within `apply` only.
    """
    optimizer._backend_reset_gradient_accumulators()


def apply_weight_decay(optimizer: Optimizer, variables: list) -> None:
    """Decays the weights that are not excluded.

    Keras does so within `apply` only.
    """
    optimizer._apply_weight_decay(variables)


def update_variables(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Runs `update_step` for all variables, in the way of their strategy.

    The public `update_step` is of one variable in one replica.
    """
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)


def update_averages(optimizer: Optimizer, variables: list) -> None:
    """Updates the moving averages of variables.

    Keras does so within `apply` only.
    """
    optimizer._update_model_variables_moving_average(variables)


def averages_of(optimizer: Optimizer) -> list[tf.Variable | None]:
    """Returns the moving averages, None for a variable without one.

    The public `finalize_variable_values` copies them to the variables for good.
    """
    return optimizer._model_variables_moving_average
