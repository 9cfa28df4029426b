"""The error of a broken contract, and the comparisons that raise it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfgradcomp.core.contracts import named_leaves


class ContractError(AssertionError):
    """A contract that a method or a transport breaks. The message shows numbers."""


def require(holds: Any, message: str) -> None:
    """Raises ContractError with a message unless a condition holds."""
    if not holds:
        raise ContractError(message)


def require_same_bits(what: str, found: Any, expected: Any) -> None:
    """Raises ContractError unless two nests have the same bits, -0.0 and NaN included.

    `what` describes both nests, for the message.
    """
    nests = [
        {name: np.asarray(leaf) for name, leaf in named_leaves(nest).items()}
        for nest in (found, expected)
    ]
    forms = [{n: (a.dtype.name, a.shape) for n, a in v.items()} for v in nests]
    require(forms[0] == forms[1], f"{what} differ. Received: {forms[0]} and {forms[1]}")
    for name, a in nests[0].items():
        b = nests[1][name]
        rows = [v.reshape(v.size, 1).view(np.uint8) for v in (a, b)]
        places = np.flatnonzero((rows[0] != rows[1]).any(1))
        for place in places[:1]:
            raise ContractError(
                f"{what} differ in {len(places)} of {a.size} elements of {name!r}. "
                f"Received: element {place}={a.flat[place]} and {b.flat[place]}"
            )


def require_finite(what: str, nest: Any) -> None:
    """Raises ContractError unless all numbers of a nest are finite."""
    for name, leaf in named_leaves(nest).items():
        bad = np.flatnonzero(~np.isfinite(np.asarray(leaf, np.float64)))
        require(
            not len(bad), f"{what} must be finite. Received: {name!r} at elements {bad}"
        )
