"""Names of a package that are imported at their first use.

What needs no TensorFlow must not wait for its import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attributes(package: str, origins: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, from the module that each name is in."""

    def __getattr__(name: str) -> Any:
        if name not in origins:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}. It has: {[*origins]}"
            )
        value = getattr(importlib.import_module(origins[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
