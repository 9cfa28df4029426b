"""An operation: a reference in pure TensorFlow and a native op with the same bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, Generic, ParamSpec, TypeVar

import tensorflow as tf

from tfgradcomp.ops.dispatch import takes_native
from tfgradcomp.ops.native import call, decode

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """A function with two implementations that return the same bits.

    A call runs the native op where `dispatch.takes_native` says so, else the reference.
    The object has the name, the docstring and the signature of the reference.

    Args:
        reference: Function in pure TensorFlow. It is the contract.
        op: Name of the native op, without the library's prefix. None: the name of the
            reference.
        static: Name of an argument that the native op must know when a graph is built.
            If this argument is a tensor, the reference runs.
        vectors: As for `native.call`.
        optional: As for `native.call`.
        arguments: Function from the arguments of the reference, given by name, to those
            of the native op. None: they are the same.
        results: Function from the outputs of the native op to the results of the
            reference. None: they are the same.
        applicable: Whether the library has an op `apply_<op>`, which updates variables
            by the vector that `op` decodes.
        on_gpu: Whether the op has a kernel for GPUs. If not, the reference runs where
            TensorFlow sees one.
    """

    __name__: str

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        op: str | None = None,
        static: str | None = None,
        vectors: Collection[str] = (),
        optional: Collection[str] = (),
        arguments: Callable[..., dict[str, Any]] | None = None,
        results: Callable[[Any], Any] | None = None,
        applicable: bool = False,
        on_gpu: bool = True,
    ):
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.op = op or self.__name__
        self.applicable = applicable
        self._signature = inspect.signature(reference)
        self._on_gpu = on_gpu
        self._static = static
        self._vectors = vectors
        self._optional = optional
        self._arguments = arguments
        self._results = results

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the native op or the reference."""
        static = self._static and self._bind(args, kwargs)[self._static]
        if not tf.is_tensor(static) and takes_native(self.op, self._on_gpu):
            return self.native(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def native(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Runs the native op, whatever the environment says."""
        arguments = self._bind(args, kwargs)
        if "sizes" in arguments:
            return decode(self.op, arguments, self.applicable)
        if self._arguments is not None:
            arguments = self._arguments(**arguments)
        outputs = call(self.op, arguments, self._vectors, self._optional)
        if self._results is not None:
            return self._results(outputs)
        return tuple(outputs) if isinstance(outputs, tuple) else outputs

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns all arguments of a call by name, defaults included."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments
