"""Texts by which a hub and a client compare their versions, models and methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from tfgradcomp import compressors, servers
from tfgradcomp.compressors import Compressor
from tfgradcomp.core import Component
from tfgradcomp.core.registry import public_classes
from tfgradcomp.methods import Method
from tfgradcomp.servers import Server

# Errors of texts that are no JSON, or JSON of another form.
_NO_METHOD = (
    *(TypeError, LookupError, AttributeError, RecursionError),
    json.JSONDecodeError,
)


class Description(NamedTuple):
    """Facts that a hub and its clients must agree about.

    Attributes:
        version: Version of the package.
        model: The result of `describe_model`.
        method: The result of `describe_method`; "" takes that of the other side.
    """

    version: str
    model: str
    method: str


def first_difference(hub: Description, client: Any) -> str:
    """Returns a sentence about the first difference; "" if there is none.

    Args:
        hub: The hub's description.
        client: A description or a `Hello`, which has the same attributes.
    """
    if client.version != hub.version:
        return (
            f"it has tfgradcomp {client.version}, the hub has {hub.version}. Install "
            "the same version"
        )
    if client.model != hub.model:
        pairs = zip(
            hub.model.splitlines() + ["nothing"],
            client.model.splitlines() + ["nothing"],
            strict=False,
        )
        for place, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return (
                    f"its model differs. Line {place} is {theirs[:200]!r}, in the "
                    f"hub's model {ours[:200]!r}"
                )
        return "its model has other variables"
    if client.method not in ("", hub.method):
        return f"its method is {client.method[:500]}, the hub's is {hub.method[:500]}"
    return ""


def describe_variables(trained: Sequence, statistics: Sequence, frozen: str) -> str:
    """Returns a line for each variable: its name, shape and type.

    Args:
        trained: The trained variables.
        statistics: The statistics of normalization layers.
        frozen: A hash of the weights that are not trained; "" if there are none.
    """
    lines = [
        f"{kind} {variable.name} {[*variable.shape]} {variable.dtype}"
        for kind, variables in (("trained", trained), ("statistics", statistics))
        for variable in variables
    ]
    return "\n".join([*lines, f"frozen {frozen}"] if frozen else lines)


def describe_method(method: Method) -> str:
    """Returns a method as JSON: its parts and their arguments.

    Parts of the package can be read back by `read_method`, which runs no code of the
    other side. Methods of equal mathematics have equal texts.
    """
    return json.dumps(_described(method), sort_keys=True)


def read_method(text: str) -> Method:
    """Returns the method that `describe_method` has described.

    Raises:
        ValueError: If the text is none, or names a class outside this package.
    """
    try:
        method = _read(json.loads(text))
    except _NO_METHOD as error:
        raise ValueError(
            "The hub's method cannot be read. Give `Client` the method as an argument. "
            f"Received: {text[:500]} ({error})"
        ) from error
    if not isinstance(method, Method):
        raise ValueError(f"Expected a method. Received: {text[:500]}")
    return method


def _described(value):
    if isinstance(value, Component):
        arguments = {
            field.name: _described(getattr(value, field.name))
            for field in fields(value)
            if field.compare
        }
        return {"class": type(value).__name__, "arguments": arguments}
    return [*map(_described, value)] if isinstance(value, tuple) else value


def _read(value):
    if isinstance(value, list):
        return tuple(map(_read, value))
    if not isinstance(value, dict):
        return value
    known = {
        "Method": Method,
        **public_classes(compressors.__name__, Compressor),
        **public_classes(servers.__name__, Server),
    }
    name = value.get("class")
    if name not in known:
        raise ValueError(
            f"The hub's method has the part {name!r}, which is none of this package. "
            f"Give `Client` the method as an argument. Received: class={name!r}"
        )
    return known[name](**{k: _read(v) for k, v in value["arguments"].items()})
