"""The parts of a Keras optimizer's step, which are public only together, as `apply`."""

from __future__ import annotations

from functools import partial

import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.inner_optimizer import position
from tfgradcomp.compat.replace import replace, replaced_by_replicas

replace_update = partial(replace, Optimizer, "_backend_apply_gradients")
"""Replaces the update, from decay to averages, but not the clipping before it.

The function is called as `function(original, optimizer, gradients, variables)`.
"""

replace_learning_rate = partial(replace, Optimizer, "_get_current_learning_rate")
"""Makes optimizers read their learning rate by `function(original, optimizer)`.

The public `learning_rate` must not be set within a graph.
"""

replace_gradient_sum = partial(replace, Optimizer, "_all_reduce_sum_gradients")
"""Replaces the sum of gradients over replicas, which Keras cannot leave out.

The function is called as `function(original, optimizer, gradients_and_variables)`.
"""


def has_own_clipping(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's class clips in another way than Keras."""
    return type(optimizer)._clip_gradients is not Optimizer._clip_gradients


def clip_gradients(optimizer: Optimizer, gradients: list) -> list:
    """Applies `clipnorm`, `clipvalue` or `global_clipnorm`."""
    return optimizer._clip_gradients(gradients)


def accumulated_gradients(optimizer: Optimizer) -> list:
    """Returns the variables of accumulated gradients."""
    return getattr(optimizer, "_accumulated_gradients", None) or []


def accumulators_of(optimizer: Optimizer, variables: list) -> list:
    """Returns the accumulated gradients of some variables."""
    everything = accumulated_gradients(optimizer)
    return [everything[position(optimizer, variable)] for variable in variables]


def add_to_accumulators(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Adds gradients to the accumulated gradients."""
    accumulators = accumulators_of(optimizer, variables)
    optimizer._backend_increment_gradient_accumulators(gradients, accumulators)


def reset_accumulators(optimizer: Optimizer) -> None:
    """Sets the accumulated gradients to zero."""
    optimizer._backend_reset_gradient_accumulators()


def apply_weight_decay(
    optimizer: Optimizer, variables: list, rate: tf.Tensor | None = None
) -> None:
    """Decays the weights that are not excluded.

    Args:
        optimizer: The optimizer.
        variables: The variables.
        rate: The learning rate; None for the optimizer's.
    """
    if rate is None:
        optimizer._apply_weight_decay(variables)
        return
    # Keras reads the rate in the thread that updates all replicas, not in this one.
    with replaced_by_replicas(optimizer, "_get_current_learning_rate", lambda: rate):
        optimizer._apply_weight_decay(variables)


def update_variables(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Runs `update_step` for all variables, in the way of their strategy.

    The public `update_step` is of a single variable in a single replica.
    """
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)


def update_averages(optimizer: Optimizer, variables: list) -> None:
    """Updates the moving averages of variables."""
    optimizer._update_model_variables_moving_average(variables)


def averages_of(optimizer: Optimizer) -> list[tf.Variable | None]:
    """Returns the moving averages; None for a variable that is not averaged.

    The public `finalize_variable_values` copies them to the variables for good.
    """
    return optimizer._model_variables_moving_average
