"""Checks of arguments that several wrappers share."""

from __future__ import annotations

import keras


def check_choice(name: str, value, choices: tuple) -> None:
    """Raises ValueError, naming the choices, unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}. Received: {name}={value!r}")


def check_integer(name: str, value, low: int, high: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer in `[low, high)`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(
            f"{name} must be an integer, at least {low}. Received: {name}={value!r}"
        )
    if high is not None and value >= high:
        raise ValueError(f"{name} must be below {high}. Received: {name}={value}")


def refuse_wrappers(inner: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if the inner optimizer is itself a wrapper."""
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "LossScaleOptimizer belongs outside: LossScaleOptimizer(TernGrad(SGD())). "
            "With the policy 'mixed_float16', `model.compile` adds it by itself. "
            "Received: inner_optimizer=LossScaleOptimizer"
        )
    if hasattr(inner, "inner_optimizer"):
        raise ValueError(
            "A compressed optimizer cannot wrap another one: gradients are exchanged "
            f"once. Received: inner_optimizer={type(inner).__name__}"
        )


def refuse_inner_momentum(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if the inner optimizer has momentum of its own."""
    inner = optimizer.inner_optimizer
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
