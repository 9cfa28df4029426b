"""Signatures of wrappers, with the arguments that `**kwargs` stands for."""

from __future__ import annotations

import inspect
from typing import Any


def full_signature(cls: Any) -> inspect.Signature:
    """Returns the signature of a `CompressedOptimizer`'s subclass.

    `*args` of its constructor are the arguments of `make_method`. `**kwargs` are the
    arguments of its base class, without those of the base class' method.

    Args:
        cls: The subclass.
    """
    own = [*inspect.signature(cls.__init__).parameters.values()][1:]
    if any(one.kind is one.VAR_POSITIONAL for one in own):
        own = [own[0], *_parameters(cls.make_method), own[-1]]
    if own[-1].kind is own[-1].VAR_KEYWORD:
        own.pop()
        base = cls.__mro__[1]
        left_out = {*cls.refused_arguments, *(one.name for one in own)}
        if "server" in inspect.signature(base).parameters:
            # The base class has no method of its own.
            left_out |= {one.name for one in _parameters(base.make_method)}
        own += [
            one.replace(kind=one.KEYWORD_ONLY)
            for one in _parameters(base)
            if one.name not in left_out and one.kind is not one.VAR_KEYWORD
        ]
    return inspect.Signature(own)


def _parameters(function: Any) -> list[inspect.Parameter]:
    return [*inspect.signature(function).parameters.values()]
