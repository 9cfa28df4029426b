"""The base class of wrappers whose method comes from a function of `methods/`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from tfgradcomp.engine.reply_bytes import warn_of_long_replies
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer

_INNER = "    inner_optimizer: A Keras optimizer, its name or its config."
_COMMON = "    **kwargs: Those of `CompressedOptimizer` from `transport` on."


class MethodWrapper(CompressedOptimizer):
    """A `CompressedOptimizer` that takes the arguments of a function of `methods/`.

    The constructor, `for_layers`, the configuration and the documentation follow from
    the function's signature and docstring:

        class TernGrad(MethodWrapper, function=methods.terngrad):
            ...

    `make_method` of the class is the function.
    """

    def __init_subclass__(
        cls, function: Callable[..., Method] | None = None, **kwargs: Any
    ):
        if function is not None:
            cls.make_method = staticmethod(function)  # type: ignore[method-assign]
            cls.__doc__ = _joined_doc(cls, function)
        super().__init_subclass__(**kwargs)

    def __init__(self, inner_optimizer: InnerOptimizer, *args: Any, **kwargs: Any):
        signature = inspect.signature(self.make_method)
        given = {
            name: kwargs.pop(name) for name in signature.parameters if name in kwargs
        }
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        method = self.make_method(**bound.arguments)
        super().__init__(inner_optimizer, method, **kwargs)
        self.keep_arguments(**bound.arguments)

    @override
    def _build(self, variables):
        super()._build(variables)
        # Local steps exchange once in many steps, some variables at a time.
        if self._group is None and "reply" in self.argument_names:
            warn_of_long_replies(self.plan, self.method)


def _joined_doc(cls: type, function: Callable) -> str:
    """Returns the docstring of a wrapper: its function's, with its own example."""
    doc = inspect.getdoc(function) or ""
    example = (inspect.getdoc(cls) or "").partition("Example:")[2]
    text, _, rest = doc.partition("Example:")
    references = rest.partition("References:")[2]
    summary, _, errors = text.partition("Raises:")
    summary, _, arguments = summary.partition("Args:\n")
    arguments = f"Args:\n{_INNER}\n{arguments.rstrip()}".rstrip()
    parts = [
        summary.rstrip(),
        f"{arguments}\n{_COMMON}",
        f"Raises:{errors.rstrip()}",
        f"Example:{example.rstrip()}",
    ]
    if references:
        parts.append(f"References:{references.rstrip()}")
    return "\n\n".join(parts)
