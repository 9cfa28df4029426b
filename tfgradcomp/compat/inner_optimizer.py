"""The steps of a Keras optimizer's `apply`, taken apart around the exchange.

Keras runs them as one: unscale, accumulate, clip, decay, all-reduce, update, average.
The exchange of compressed gradients stands between clipping and decay, outside every
conditional, so that a worker with a non-finite gradient hangs nobody and a skipped
step has changed nothing.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.conditional import conditional


def filtered(
    optimizer: Optimizer, gradients: list, variables: list
) -> tuple[list, list]:
    """Drops variables without a gradient, as Keras does, with Keras' warning.

    Raises:
        ValueError: If the optimizer was built without one of the variables.
    """
    optimizer._check_variables_are_known(variables)
    gradients, variables = optimizer._filter_empty_gradients(gradients, variables)
    return optimizer._overwrite_variables_directly_with_gradients(gradients, variables)


def is_overwritten(optimizer: Optimizer, variable: keras.Variable) -> bool:
    """Returns whether Keras assigns the gradient to the variable (float8 scales)."""
    return optimizer._overwrite_variable_with_gradient(variable)


def position(optimizer: Optimizer, variable: keras.Variable) -> int:
    """Index of a variable among those that the optimizer was built with."""
    return optimizer._get_variable_index(variable)


def trainable_variables(optimizer: Optimizer) -> list:
    """Returns the variables that the optimizer was built with."""
    return optimizer._trainable_variables


def track(optimizer: Optimizer, variables: list) -> None:
    """Adds variables to those that Keras saves and counts as the optimizer's."""
    for variable in variables:
        optimizer._track_variable(variable)


def step_counter(optimizer: Optimizer) -> keras.Variable:
    """The variable that counts calls; `iterations` divides it by accumulation steps."""
    return optimizer._iterations


def clips(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer clips gradients."""
    limits = optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm
    return any(limit is not None for limit in limits)


def clipped(optimizer: Optimizer, gradients: list) -> list:
    """Applies `clipnorm`, `clipvalue` or `global_clipnorm` of the optimizer."""
    return optimizer._clip_gradients(gradients)


def is_update_step(optimizer: Optimizer) -> tf.Tensor:
    """Returns whether this call ends a window of `gradient_accumulation_steps`."""
    steps = optimizer.gradient_accumulation_steps
    return tf.equal((tf.convert_to_tensor(optimizer._iterations) + 1) % steps, 0)


def accumulated(optimizer: Optimizer, gradients: list, variables: list) -> list:
    """Returns the mean gradient of the window that ends with `gradients`."""
    steps = optimizer.gradient_accumulation_steps
    return [
        (gradient + tf.convert_to_tensor(total)) / steps
        for gradient, total in zip(
            gradients, _accumulators(optimizer, variables), strict=True
        )
    ]


def accumulate(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Adds to the window's gradients; the weights stay."""
    optimizer._backend_increment_gradient_accumulators(
        gradients, _accumulators(optimizer, variables)
    )
    _finish(optimizer, variables)


def drop_window(optimizer: Optimizer) -> None:
    """Forgets the window's gradients and steps back to where it began."""
    optimizer._backend_reset_gradient_accumulators()
    optimizer._iterations.assign_add(1 - optimizer.gradient_accumulation_steps)


def update(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Applies gradients that are unscaled, clipped and aggregated already."""
    optimizer._apply_weight_decay(variables)
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    tf.__internal__.distribute.interim.maybe_merge_call(
        optimizer._distributed_tf_update_step,
        optimizer._distribution_strategy,
        list(zip(gradients, values, strict=True)),
        optimizer.learning_rate,
    )
    if optimizer.gradient_accumulation_steps:
        optimizer._backend_reset_gradient_accumulators()
    _finish(optimizer, variables)


def _accumulators(optimizer, variables):
    return [optimizer._accumulated_gradients[position(optimizer, v)] for v in variables]


def _finish(optimizer, variables):
    if optimizer.use_ema:
        _update_averages(optimizer)
    for variable in variables:
        constraint = getattr(variable, "constraint", None)
        if constraint is not None:
            variable.assign(constraint(variable))
    optimizer._iterations.assign_add(1)


def _update_averages(optimizer):
    weights = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(weights)
    frequency = optimizer.ema_overwrite_frequency
    if frequency:

        def overwrite():
            for weight, average in zip(
                weights, optimizer._model_variables_moving_average, strict=True
            ):
                if average is not None:
                    weight.assign(average)

        due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % frequency, 0)
        conditional(due, overwrite, lambda: None)
