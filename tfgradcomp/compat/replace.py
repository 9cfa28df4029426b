"""Replacement of functions of Keras and TensorFlow, which have no hooks there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


def replace(owner: Any, name: str, replacement: Callable) -> None:
    """Makes `owner.name(...)` call `replacement(original, ...)`.

    `owner` is a class or a module. Later calls for the same name have no effect.
    """
    original = getattr(owner, name)
    if not hasattr(original, "_tfgradcomp_original"):
        function = functools.wraps(original)(functools.partial(replacement, original))

        @functools.wraps(original)
        def method(*args, **kwargs):
            return function(*args, **kwargs)

        setattr(method, "_tfgradcomp_original", original)  # noqa: B010
        setattr(owner, name, method)


@contextlib.contextmanager
def replaced_attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another attribute for as long as the context lasts.

    The object's `__setattr__`, by which Keras tracks layers and variables, is not
    called.
    """
    attributes = vars(instance)
    had_attribute, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had_attribute:
            attributes[name] = before
        else:
            attributes.pop(name, None)


@contextlib.contextmanager
def replaced_by_replicas(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object an attribute that hides its class', in the step of a replica.

    Replicas are threads, and each of them sets it. What Keras does with it happens
    once all of them have come to it, so that the first one that goes on removes it.
    """
    vars(instance)[name] = value
    try:
        yield
    finally:
        vars(instance).pop(name, None)
