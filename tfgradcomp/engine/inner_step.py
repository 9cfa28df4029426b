"""The steps of a Keras optimizer, taken apart around the exchange.

Keras runs them as one: unscale, accumulate, clip, decay, all-reduce, update, average.
The exchange of compressed gradients stands between clipping and decay, outside every
conditional, so that a worker with a non-finite gradient makes no worker wait and a
skipped step has changed nothing.

After the exchange the optimizer's own `apply_gradients` runs, with any override of it
or of `update_step` in a subclass. The parts done before the exchange are left out of
Keras' base class, for the thread of this replica and this call alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat import optimizer_step as parts
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.inner_optimizer import (
    MULTI_OPTIMIZER,
    member_indices,
    members,
    position,
    step_counter,
    trainable_variables,
)


class FusedUpdate(NamedTuple):
    """An update of variables whose gradients are never written to memory.

    Attributes:
        positions: Positions of the variables.
        apply: Takes the optimizer's step for them, with its weight decay.
    """

    positions: Collection[int]
    apply: Callable[[], None]


class _Thread(threading.local):
    """The state of a thread; the replicas of one process have a thread each.

    Attributes:
        phase: "update" for gradients that have been exchanged, "accumulate" for those
            of an unfinished window, "alone" for those that are never exchanged; None
            outside of a wrapper.
        direct: The update of variables that skip the optimizer's own step, or None.
        rate: The learning rate of this call; None for the optimizer's own.
    """

    phase: str | None = None
    direct: FusedUpdate | None = None
    rate: tf.Tensor | None = None


_thread = _Thread()


def learning_rate(optimizer: Optimizer) -> tf.Tensor:
    """Returns the learning rate of this step; 1 for a `MultiOptimizer`."""
    if isinstance(optimizer, MULTI_OPTIMIZER):
        return tf.constant(1.0)
    return tf.convert_to_tensor(optimizer.learning_rate)


def clips(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer clips gradients."""
    return any(
        parts.has_own_clipping(member)
        or member.clipnorm is not None
        or member.clipvalue is not None
        or member.global_clipnorm is not None
        for member in members(optimizer)
    )


def clipped(optimizer: Optimizer, gradients: list, variables: list) -> list:
    """Applies `clipnorm`, `clipvalue` or `global_clipnorm` of the optimizer."""
    if not isinstance(optimizer, MULTI_OPTIMIZER):
        return parts.clip_gradients(optimizer, gradients)
    owners = member_indices(optimizer, variables)
    result: dict[int, tf.Tensor] = {}
    for index, member in enumerate(members(optimizer)):
        own = [i for i, owner in enumerate(owners) if owner == index]
        own_clipped = parts.clip_gradients(member, [gradients[i] for i in own])
        result.update(zip(own, own_clipped, strict=True))
    return [result[i] for i in range(len(gradients))]


def is_update_step(optimizer: Optimizer) -> tf.Tensor:
    """Returns whether this call ends a window of `gradient_accumulation_steps`."""
    steps = optimizer.gradient_accumulation_steps
    calls = tf.convert_to_tensor(step_counter(optimizer))
    return tf.equal((calls + 1) % steps, 0)


def accumulated(optimizer: Optimizer, gradients: list, variables: list) -> list:
    """Returns the mean gradient of the window that ends with `gradients`."""
    steps = optimizer.gradient_accumulation_steps
    totals = parts.accumulators_of(optimizer, variables)
    return [
        (gradient + tf.convert_to_tensor(total)) / steps
        for gradient, total in zip(gradients, totals, strict=True)
    ]


def accumulate(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Adds to the window's gradients; Keras' update of the weights is left out."""
    parts.add_to_accumulators(optimizer, gradients, variables)
    _apply("accumulate", optimizer, gradients, variables)


def drop_window(optimizer: Optimizer) -> None:
    """Forgets the window's gradients and steps back to its begin."""
    parts.reset_accumulators(optimizer)
    rewind_window(optimizer)


def rewind_window(optimizer: Optimizer) -> None:
    """Steps back to the begin of the window."""
    counter = step_counter(optimizer)
    calls = tf.convert_to_tensor(counter)
    counter.assign_sub(calls % optimizer.gradient_accumulation_steps)


def go_to_end_of_window(optimizer: Optimizer) -> None:
    """Counts all calls of a new window except for the last."""
    step_counter(optimizer).assign_add(optimizer.gradient_accumulation_steps - 1)


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
        gradients: Tensors; None for the variables of `direct`.
        variables: The variables.
        direct: Updates some of the variables in place of the optimizer.
        rate: The learning rate of this step alone; None for the optimizer's.
    """
    # Keras would leave out a variable without a gradient.
    nothing = tf.zeros([])
    gradients = [nothing if g is None else g for g in gradients]
    _thread.direct = direct
    try:
        _apply("update", optimizer, gradients, variables, rate)
    finally:
        _thread.direct = None


def apply_alone(optimizer: Optimizer, gradients: list, variables: list) -> None:
    """Takes Keras' own step with the gradients of this replica alone."""
    _apply("alone", optimizer, gradients, variables)


def _apply(phase, optimizer, gradients, variables, rate=None):
    parts.replace_update(_apply_gradients)
    parts.replace_learning_rate(_current_learning_rate)
    parts.replace_gradient_sum(_all_reduce_sum_gradients)
    scale = optimizer.loss_scale_factor
    if scale and phase != "alone":
        # Keras divides by it, and a subclass may expect it.
        gradients = [gradient * scale for gradient in gradients]
    if isinstance(optimizer, MULTI_OPTIMIZER):
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
        _update_step(optimizer, gradients, variables)
        if optimizer.gradient_accumulation_steps:
            parts.reset_accumulators(optimizer)
    _update_averages(optimizer)


def _update_step(optimizer, gradients, variables):
    direct = _thread.direct
    pairs = list(zip(gradients, variables, strict=True))
    if direct:
        pairs = [p for p in pairs if position(optimizer, p[1]) not in direct.positions]
    others = [variable for _, variable in pairs]
    # Keras alone takes a decay of 0, which turns -0.0 into 0.0.
    decayed = others if optimizer.weight_decay else variables
    parts.apply_weight_decay(optimizer, decayed, _thread.rate)
    if direct:
        direct.apply()
    if pairs:
        parts.update_variables(optimizer, [gradient for gradient, _ in pairs], others)


def _all_reduce_sum_gradients(original, optimizer, gradients_and_variables):
    if _thread.phase is None:
        return original(optimizer, gradients_and_variables)
    return gradients_and_variables


def _update_averages(optimizer):
    if not optimizer.use_ema:
        return
    weights = trainable_variables(optimizer)
    parts.update_averages(optimizer, weights)
    frequency = optimizer.ema_overwrite_frequency
    if frequency:

        def overwrite():
            averages = parts.averages_of(optimizer)
            for weight, average in zip(weights, averages, strict=True):
                if average is not None:
                    weight.assign(average)

        due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % frequency, 0)
        conditional(due, overwrite, lambda: None)
