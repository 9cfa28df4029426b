"""Exchanging a function of Keras for one of ours that may call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace(owner: Any, name: str, replacement: Callable) -> None:
    """Makes `owner.name(...)` call `replacement(original, ...)`; once, however often.

    Args:
        owner: A class or a module.
        name: Name of a function in it.
        replacement: Takes the original function first, then its arguments.
    """
    original = getattr(owner, name)
    if not hasattr(original, "_tfgradcomp_original"):
        function = functools.wraps(original)(functools.partial(replacement, original))

        @functools.wraps(original)
        def method(*args, **kwargs):
            return function(*args, **kwargs)

        setattr(method, "_tfgradcomp_original", original)  # noqa: B010
        setattr(owner, name, method)
