"""Checks of arguments that several wrappers share."""

from __future__ import annotations


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raises ValueError, naming the choices, unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}. Received: {name}={value!r}")


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer in `[low, high)`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(
            f"{name} must be an integer, at least {low}. Received: {name}={value!r}"
        )
    if high is not None and value >= high:
        raise ValueError(f"{name} must be at most {high - 1}. Received: {name}={value}")


def check_instance(name: str, value: object, kind: type) -> None:
    """Raises ValueError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} must be a {kind.__name__}. Received: {name}={value!r}"
        )
