"""Checks of which methods go with which inner optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compressors import ErrorFeedback, Identity, MeanErrorFeedback
from tfgradcomp.methods import Method

# By these names Keras' optimizers call what decays the averages of squares.
_SECOND_MOMENTS = (
    "beta_2",
    "adam_beta_2",
    "beta_2_decay",
    "rho",
    "initial_accumulator_value",
)
_TRAINS_BADLY = (
    "Error feedback stands in front of an inner optimizer that averages gradients or "
    "their squares: a residual of many steps arrives at once and counts as one large "
    "gradient. This is known to train badly."
)


def rescales(inner: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer divides each element by averages of its squares."""
    return any(hasattr(inner, name) for name in _SECOND_MOMENTS)


def check_inner_optimizer(method: Method, inner: keras.optimizers.Optimizer) -> None:
    """Checks that a method goes with an inner optimizer that takes its replies.

    Args:
        method: The method.
        inner: The inner optimizer.

    Raises:
        ValueError: If both hold a momentum; if error feedback stands in front of a
            momentum, or of averages of squares.

    Warns:
        UserWarning: If feedback of the common error stands in front of such averages.
    """
    part: Any = method.compressor
    while part is not None and not isinstance(part, ErrorFeedback):
        part = getattr(part, "compressor", None)
    has_feedback = part is not None and part.compressor != Identity()
    for member in compat.members(inner):
        momentum = _momentum(member)
        received = f"Received: inner_optimizer={type(member).__name__}({momentum})"
        if momentum and method.refuses_inner_momentum:
            raise ValueError(
                f"{method.name} holds the momentum itself, on each worker. Use an "
                "inner optimizer without momentum, such as "
                "keras.optimizers.SGD(learning_rate), or allow_inner_momentum=True. "
                f"{received}"
            )
        if has_feedback and isinstance(part, MeanErrorFeedback):
            # PowerSGD's paper has its momentum behind the feedback.
            if rescales(member):
                warnings.warn(f"{_TRAINS_BADLY} {received}", UserWarning, stacklevel=4)
        elif has_feedback and (momentum or rescales(member)):
            raise ValueError(
                f"{_TRAINS_BADLY} Use {_right_form(member)}; or "
                "keras.optimizers.SGD(learning_rate) without momentum inside. "
                "allow_inner_momentum=True allows it nevertheless. "
                f"{received}, method={method.name}"
            )


def _momentum(inner: keras.optimizers.Optimizer) -> str:
    """Returns an optimizer's momentum as an argument; empty if it has none."""
    name, value = compat.momentum_of(inner)
    return name and f"{name}={value}"


def _right_form(inner: keras.optimizers.Optimizer) -> str:
    """Returns a method that trains well with the optimizer."""
    optimizers = keras.optimizers
    if isinstance(inner, optimizers.SGD):
        return (
            f"DistEFBlockSGDM(keras.optimizers.SGD(learning_rate), {_momentum(inner)}),"
            " whose workers hold the momentum"
        )
    if isinstance(inner, optimizers.Adam):
        return "OneBitAdam, whose workers hold Adam's momentum"
    if isinstance(inner, optimizers.Lamb):
        return "OneBitLAMB, whose workers hold LAMB's momentum"
    return "a method without error feedback, such as QSGD"


def check_local_steps(
    inner: keras.optimizers.Optimizer, outer: Any, stagger: bool
) -> None:
    """Checks that an optimizer goes with local steps, another with the common ones.

    Raises:
        ValueError: If the first averages weights; if the second needs second moments
            or takes local steps itself; or if it cannot exchange groups in turns.
    """
    if outer.has_local_steps:
        raise ValueError(
            "`outer` trains the weights that all workers share, so it takes no local "
            "steps itself. Expected: another optimizer, such as OneBitAdam. "
            f"Received: outer={type(outer).__name__}"
        )
    common = outer.inner_optimizer
    counted = {
        "gradient_accumulation_steps": common.gradient_accumulation_steps,
        "use_ema": common.use_ema,
    }
    if stagger and (outer.needs_new_inner or any(counted.values())):
        raise ValueError(
            "Groups that are exchanged in turns share the optimizer in `outer`, which "
            "would count each group as a step. Expected: stagger=False, or one without "
            "accumulation, averages of weights and averaged coefficients. "
            f"Received: outer={type(outer).__name__}, {counted}"
        )
    if outer.needs_second_moments:
        raise ValueError(
            "`outer` compresses a difference of weights, which has no second moments "
            "over examples. Expected: a method that needs none, such as "
            f"DistEFBlockSGDM. Received: outer={type(outer).__name__}"
        )
    check_no_averages(
        inner, "`use_ema` of the optimizer in `outer`, which trains the common weights"
    )


def check_no_averages(inner: keras.optimizers.Optimizer, expected: str) -> None:
    """Checks that an optimizer which takes steps alone averages no weights.

    Args:
        inner: The optimizer.
        expected: What may be done instead, for the error.

    Raises:
        ValueError: If it does.
    """
    if inner.use_ema:
        raise ValueError(
            "Averages of weights that differ between workers are useless. Expected: "
            f"{expected}. Received: inner_optimizer.use_ema=True"
        )
