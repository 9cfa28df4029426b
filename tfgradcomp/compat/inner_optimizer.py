"""The steps of a Keras optimizer's `apply`, taken apart around the exchange.

Keras runs them as one: unscale, accumulate, clip, decay, all-reduce, update, average.
The exchange of compressed gradients stands between clipping and decay, outside every
conditional, so that a worker with a non-finite gradient hangs nobody and a skipped
step has changed nothing.

After the exchange the optimizer's own `apply_gradients` runs, with whatever a subclass
does there or in `update_step`. What has been done before the exchange is passed by in
Keras' base class, for the thread of this replica and this call alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.replace import replace

# Not there before Keras 3.15.
_Multi: Any = getattr(keras.optimizers, "MultiOptimizer", ())


class FusedUpdate(NamedTuple):
    """An update of variables whose gradients nobody has written.

    Attributes:
        positions: Positions of the variables.
        apply: Takes the optimizer's step for them.
    """

    positions: Collection[int]
    apply: Callable[[], None]


class _Thread(threading.local):
    """The state of a thread; the replicas of one process have a thread each.

    Attributes:
        phase: "update" for gradients that have been exchanged, "accumulate" for those
            of a window that goes on, "alone" for those that are never exchanged; None
            outside of a wrapper.
        direct: What is updated otherwise than by the optimizer's own step, or None.
        rate: The learning rate of this call; None: the optimizer's own.
    """

    phase: str | None = None
    direct: FusedUpdate | None = None
    rate: tf.Tensor | None = None


_thread = _Thread()


def forget_variables(optimizer: Optimizer) -> None:
    """Removes the variables of an optimizer that wraps another one.

    Keras' constructor has created them; the inner optimizer has its own.
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

    Raises:
        ValueError: If the optimizer was not built with one of the variables, or if
            there is no gradient at all.
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


def strategy_of(optimizer: Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy that the optimizer was created under."""
    return optimizer._distribution_strategy


def trainable_variables(optimizer: Optimizer) -> list:
    """Returns the variables that the optimizer was built with."""
    return optimizer._trainable_variables


def copy_of(optimizer: Optimizer, variable: keras.Variable) -> keras.Variable:
    """Returns a variable of the optimizer's own that begins as one of the model's."""
    copy = optimizer.add_variable_from_reference(
        variable,
        name="anchor",
        initializer=lambda shape, dtype: tf.convert_to_tensor(variable.value),
    )
    copy.reference = variable
    return copy


def references(variables: list) -> list:
    """Returns the model's variables, also where they are given by copies."""
    return [getattr(variable, "reference", variable) for variable in variables]


def track(optimizer: Optimizer, variables: list) -> None:
    """Adds variables to those that Keras saves and counts as the optimizer's."""
    for variable in variables:
        optimizer._track_variable(variable)


def shared_variables(optimizer: Optimizer) -> list:
    """Returns weights and state that are the same on all workers.

    Accumulated gradients are each worker's own.
    """
    accumulated = getattr(optimizer, "_accumulated_gradients", None) or []
    own = {id(variable) for variable in accumulated}
    state = [v for v in optimizer.variables if id(v) not in own]
    return [*state, *optimizer._trainable_variables]


def describe(optimizer: Optimizer) -> str:
    """Returns the configuration of an optimizer, without its name."""
    try:
        config = optimizer.get_config()
    except NotImplementedError:
        config = {}
    own = {key: value for key, value in config.items() if key != "name"}
    return f"{type(optimizer).__name__}({own})"


def step_counter(optimizer: Optimizer) -> keras.Variable:
    """The variable that counts calls; `iterations` divides it by accumulation steps."""
    return optimizer._iterations


def decayed(optimizer: Optimizer, variables: list) -> list:
    """Returns the variables, None for each that is excluded from weight decay."""
    return [v if optimizer._use_weight_decay(v) else None for v in variables]


def members(optimizer: Optimizer) -> list:
    """Returns the optimizers in a `MultiOptimizer`; of any other one, itself."""
    return optimizer.optimizers if isinstance(optimizer, _Multi) else [optimizer]


def refuse_wrappers_in_multi_optimizer(message: str) -> None:
    """Makes `MultiOptimizer` raise ValueError if it is given a wrapper."""

    def checked(original, optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        if any(hasattr(member, "inner_optimizer") for member in members(optimizer)):
            names = [type(member).__name__ for member in members(optimizer)]
            raise ValueError(f"{message} Received: optimizers={names}")

    if _Multi:
        replace(_Multi, "__init__", checked)
        # A function that chooses optimizers is first called there.
        replace(_Multi, "build", checked)


def learning_rate(optimizer: Optimizer) -> tf.Tensor:
    """The learning rate of this step; 1 where there are several."""
    if isinstance(optimizer, _Multi):
        return tf.constant(1.0)
    return tf.convert_to_tensor(optimizer.learning_rate)


def clips(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer clips gradients."""
    return any(
        type(member)._clip_gradients is not Optimizer._clip_gradients
        or member.clipnorm is not None
        or member.clipvalue is not None
        or member.global_clipnorm is not None
        for member in members(optimizer)
    )


def clipped(optimizer: Optimizer, gradients: list, variables: list) -> list:
    """Applies `clipnorm`, `clipvalue` or `global_clipnorm` of the optimizer."""
    if not isinstance(optimizer, _Multi):
        return optimizer._clip_gradients(gradients)
    owners = [optimizer._var_to_optimizer_idx[optimizer._var_key(v)] for v in variables]
    result: dict[int, tf.Tensor] = {}
    for index, member in enumerate(members(optimizer)):
        own = [i for i, owner in enumerate(owners) if owner == index]
        own_clipped = member._clip_gradients([gradients[i] for i in own])
        result.update(zip(own, own_clipped, strict=True))
    return [result[i] for i in range(len(gradients))]


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
    """Adds to the window's gradients; Keras' update of the weights is left out."""
    optimizer._backend_increment_gradient_accumulators(
        gradients, _accumulators(optimizer, variables)
    )
    _apply("accumulate", optimizer, gradients, variables)


def drop_window(optimizer: Optimizer) -> None:
    """Forgets the window's gradients and steps back to where it began."""
    optimizer._backend_reset_gradient_accumulators()
    rewind_window(optimizer)


def rewind_window(optimizer: Optimizer) -> None:
    """Steps back to where the window began."""
    calls = tf.convert_to_tensor(optimizer._iterations)
    optimizer._iterations.assign_sub(calls % optimizer.gradient_accumulation_steps)


def go_to_end_of_window(optimizer: Optimizer) -> None:
    """Counts all calls of a window that begins, but the last one."""
    optimizer._iterations.assign_add(optimizer.gradient_accumulation_steps - 1)


def update(
    optimizer: Optimizer,
    gradients: list,
    variables: list,
    direct: FusedUpdate | None = None,
    rate: tf.Tensor | None = None,
) -> None:
    """Applies gradients that are unscaled, clipped and aggregated already.

    Args:
        optimizer: The optimizer.
        gradients: Tensors; None for those of `direct`.
        variables: The variables.
        direct: Updates some of the variables, where the optimizer would.
        rate: The learning rate of this step alone; None: the optimizer's.
    """
    # Keras would leave out a variable without a gradient.
    gradients = [tf.zeros([]) if g is None else g for g in gradients]
    _thread.direct = direct
    try:
        _apply("update", optimizer, gradients, variables, rate)
    finally:
        _thread.direct = None


def apply_alone(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Takes a step of Keras' as it is, with the gradients of this replica alone."""
    _apply("alone", optimizer, gradients, variables)


def _apply(phase, optimizer, gradients, variables, rate=None):
    replace(Optimizer, "_backend_apply_gradients", _apply_gradients)
    replace(Optimizer, "_get_current_learning_rate", _current_learning_rate)
    replace(Optimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients)
    scale = optimizer.loss_scale_factor
    if scale and phase != "alone":
        # Keras divides by it, and a subclass may expect it.
        gradients = [gradient * scale for gradient in gradients]
    if isinstance(optimizer, _Multi):
        # It takes gradients of all variables only.
        known = {position(optimizer, v): i for i, v in enumerate(variables)}
        variables = trainable_variables(optimizer)
        gradients = [
            gradients[known[i]] if i in known else None for i in range(len(variables))
        ]
    _thread.phase, _thread.rate = phase, rate
    try:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    finally:
        _thread.phase = _thread.rate = None


def _current_learning_rate(original, optimizer):
    return original(optimizer) if _thread.rate is None else _thread.rate


def _apply_gradients(original, optimizer, gradients, variables):
    if _thread.phase in (None, "alone"):
        return original(optimizer, gradients, variables)
    if _thread.phase == "update":
        optimizer._apply_weight_decay(variables)
        _update_step(optimizer, gradients, variables)
        if optimizer.gradient_accumulation_steps:
            optimizer._backend_reset_gradient_accumulators()
    _update_averages(optimizer)


def _update_step(optimizer, gradients, variables):
    direct = _thread.direct
    pairs = list(zip(gradients, variables, strict=True))
    if direct:
        pairs = [p for p in pairs if position(optimizer, p[1]) not in direct.positions]
        direct.apply()
    if pairs:
        gradients, variables = map(list, zip(*pairs, strict=True))
        optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)


def _all_reduce_sum_gradients(original, optimizer, gradients_and_variables):
    if _thread.phase is None:
        return original(optimizer, gradients_and_variables)
    return gradients_and_variables


def _accumulators(optimizer, variables):
    return [optimizer._accumulated_gradients[position(optimizer, v)] for v in variables]


def _update_averages(optimizer):
    if not optimizer.use_ema:
        return
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
