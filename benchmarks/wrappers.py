"""The wrappers that benchmarks measure: those of the package, found in its registry."""

from __future__ import annotations

from pathlib import Path

from tfgradcomp import optimizers
from tfgradcomp.planning.forecasts import known_methods

TABLE = Path(__file__).resolve().parents[1] / "docs" / "methods" / "all.md"


def needing_no_arguments() -> list[str]:
    """Returns the wrappers that need nothing but an inner optimizer.

    They are in the order of the table of all methods.
    """
    return sorted(known_methods(), key=position)


def position(name: str) -> int:
    """Returns where the table of all methods has a wrapper."""
    return TABLE.read_text().find(f"\n| `{name}` |")


def taking(argument: str) -> list[str]:
    """Returns the wrappers that have an argument of their own of this name."""
    return [
        name
        for name in optimizers.__all__
        if argument in getattr(optimizers, name).argument_names
    ]
