"""Checks of which methods go with which inner optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compressors import ErrorFeedback, Identity
from tfgradcomp.methods import Method

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


def check_inner_optimizer(
    method: Method, inner: keras.optimizers.Optimizer, sends_momenta: bool = False
) -> None:
    """Checks that a method goes with an inner optimizer.

    Args:
        method: The method.
        inner: The inner optimizer.
        sends_momenta: Whether the inner optimizer's momenta travel, not gradients.

    Raises:
        ValueError: If both hold a momentum.

    Warns:
        UserWarning: If error feedback stands in front of Adam or a similar optimizer.
    """
    if method.refuses_inner_momentum:
        _refuse_momentum(method, inner)
    part: Any = method.compressor
    while part is not None and not isinstance(part, ErrorFeedback):
        part = getattr(part, "compressor", None)
    has_feedback = part is not None and part.compressor != Identity()
    if has_feedback and rescales(inner) and not sends_momenta:
        warnings.warn(
            "Error feedback stands in front of an inner optimizer that rescales each "
            "element by averages over past gradients: a residual of many steps arrives "
            "at once and counts as one large gradient. This is known to train badly. "
            "Use keras.optimizers.SGD inside, or a method without error feedback. "
            f"Received: inner_optimizer={type(inner).__name__}",
            UserWarning,
            stacklevel=4,
        )


def _refuse_momentum(method: Method, optimizer: keras.optimizers.Optimizer) -> None:
    for inner in compat.members(optimizer):
        for name in ("momentum", "beta_1"):
            value = getattr(inner, name, 0)
            if value:
                raise ValueError(
                    f"{method.name} holds the momentum itself, on each worker. Use an "
                    "inner optimizer without momentum, such as "
                    "keras.optimizers.SGD(learning_rate), or allow_inner_momentum=True."
                    f" Received: inner_optimizer={type(inner).__name__}({name}={value})"
                )


def check_local_steps(inner: keras.optimizers.Optimizer, outer: Any) -> None:
    """Checks that an optimizer goes with local steps, another with the common ones.

    Raises:
        ValueError: If the first averages weights, or the second needs second moments.
    """
    if outer.needs_second_moments:
        raise ValueError(
            "`outer` compresses a difference of weights, which has no second moments "
            "over examples. Expected: a method that needs none, such as "
            f"DistEFBlockSGDM. Received: outer={type(outer).__name__}"
        )
    if inner.use_ema:
        raise ValueError(
            "Averages of weights that differ between workers are useless. Expected: "
            "`use_ema` of the optimizer in `outer`, which trains the common weights. "
            "Received: inner_optimizer.use_ema=True"
        )
