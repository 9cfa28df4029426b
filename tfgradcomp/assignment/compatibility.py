"""Checks of which methods go with which inner optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compressors import Compressor, ErrorFeedback, Identity

# By these names Keras' optimizers call what decays the averages of squares.
_SECOND_MOMENTS = (
    "beta_2",
    "adam_beta_2",
    "beta_2_decay",
    "rho",
    "initial_accumulator_value",
)


def rescales(inner: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer divides each element by averages of its squares."""
    return any(hasattr(inner, name) for name in _SECOND_MOMENTS)


def warn_before_second_moments(optimizer: Any, compressor: Compressor) -> None:
    """Warns where error feedback stands in front of Adam or the like.

    Args:
        optimizer: The `CompressedOptimizer` that asks.
        compressor: Its compressor.
    """
    part: Any = compressor
    while part is not None and not isinstance(part, ErrorFeedback):
        part = getattr(part, "compressor", None)
    inner = optimizer.inner_optimizer
    if part is None or part.compressor == Identity():
        return
    if rescales(inner) and not optimizer.stepper_class.sends_momenta:
        warnings.warn(
            "Error feedback stands in front of an inner optimizer that "
            "rescales each element by averages over past gradients: what was owed for "
            "many steps comes at once and counts as one large gradient. This is known "
            "to train badly; take keras.optimizers.SGD inside, or a method without "
            f"error feedback. Received: inner_optimizer={type(inner).__name__}",
            UserWarning,
            stacklevel=4,
        )


def refuse_inner_momentum(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if the inner optimizer has momentum of its own."""
    for inner in compat.members(optimizer.inner_optimizer):
        for name in ("momentum", "beta_1"):
            value = getattr(inner, name, 0)
            if value:
                raise ValueError(
                    f"{type(optimizer).__name__} holds the momentum itself, on each "
                    "worker; take an inner optimizer without, such as "
                    "keras.optimizers.SGD(learning_rate), or say "
                    "allow_inner_momentum=True. Received: inner_optimizer="
                    f"{type(inner).__name__}({name}={value})"
                )
