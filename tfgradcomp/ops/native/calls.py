"""Calls of the library's operations: what the families of operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import SplitVector, Vector
from tfgradcomp.ops import library


def operation(name: str) -> Callable:
    """Returns an operation of the library, which is loaded at the first call.

    Raises:
        UnavailableError: If there is no library.
    """
    return getattr(library.library().operations, f"tfgradcomp_{name}")


def tensors(x: Vector) -> list[tf.Tensor]:
    """Returns the tensors of a vector, joined to one for the kernels of a GPU."""
    return list(x) if _in_pieces(x) else [tf.convert_to_tensor(x, tf.float32)]


def scale_of(x: Vector | None) -> float:
    """Returns what the kernel has to multiply the `tensors` of a vector by."""
    return x.scale if isinstance(x, SplitVector) and _in_pieces(x) else 1.0


def call_in_parts(
    function: Callable,
    arguments: tuple,
    sizes: Sequence[int] | None,
    **attributes,
) -> Vector:
    """Calls an operation that writes a vector, into parts of the sizes if given.

    On a GPU, the operation writes one tensor, which is split afterwards.
    """
    in_place = sizes is not None and not library.gpu_is_visible()
    given = [int(size) for size in sizes or ()] if in_place else [attributes["count"]]
    values = function(*arguments, num_values=len(given), sizes=given, **attributes)
    if sizes is None:
        return values[0]
    return SplitVector(values if in_place else tf.split(values[0], sizes))


def optional(tensor: tf.Tensor | None) -> list[tf.Tensor]:
    """Returns an optional argument as a list of at most one tensor."""
    return [] if tensor is None else [tensor]


def splits(row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the ends of blocks as a tensor."""
    return tf.convert_to_tensor(row_splits, tf.int64)


def _in_pieces(x: Vector | None) -> bool:
    return isinstance(x, SplitVector) and not library.gpu_is_visible()
