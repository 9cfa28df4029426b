"""The wrappers that benchmarks measure: those of the package, found in its registry."""

from __future__ import annotations

import inspect
from pathlib import Path

from tfgradcomp import optimizers

README = Path(__file__).resolve().parents[1] / "README.md"


def needing_no_arguments() -> list[str]:
    """Returns the wrappers that need nothing but an inner optimizer.

    They are in the order of the README's table of methods.
    """
    text = README.read_text()
    names = sorted(optimizers.__all__, key=lambda name: text.find(f"\n| `{name}` |"))
    return [name for name in names if not required_arguments(name)]


def required_arguments(name: str) -> list[str]:
    """Returns the arguments, after the inner optimizer, that have no default."""
    parameters = inspect.signature(getattr(optimizers, name)).parameters.values()
    return [
        parameter.name
        for parameter in [*parameters][1:]
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]


def taking(argument: str) -> list[str]:
    """Returns the wrappers that have an argument of their own of this name."""
    return [
        name
        for name in optimizers.__all__
        if argument in getattr(optimizers, name).config_arguments
    ]
