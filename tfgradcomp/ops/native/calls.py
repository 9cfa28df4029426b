"""Calls of the library's operations: what the families of operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import DecodeOp, SplitVector, Vector
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
    name: str,
    arguments: tuple,
    sizes: Sequence[int] | None,
    **attributes,
) -> Vector:
    """Calls an operation that writes a vector, into parts of the sizes if given.

    On a GPU, the operation writes one tensor, which is split afterwards.
    """
    in_place = sizes is not None and not library.gpu_is_visible()
    given = [int(size) for size in sizes or ()] if in_place else [attributes["count"]]
    attributes |= {"num_values": len(given), "sizes": given}
    values = operation(name)(*arguments, **attributes)
    if sizes is None:
        return values[0]
    if not in_place:
        return SplitVector(tf.split(values[0], sizes))
    decoding = None
    if name in library.APPLICABLE:
        arguments = tuple(map(tf.convert_to_tensor, arguments))
        decoding = DecodeOp(name, arguments, attributes)
    return SplitVector(values, decoding=decoding)


def apply_decoded(
    decoding: DecodeOp,
    coefficients: tf.Tensor,
    variables: Sequence[Sequence[tf.Tensor]],
    offsets: Sequence[int],
    rule: str,
) -> None:
    """Updates variables by a vector, in one pass and without the vector.

    Args:
        decoding: What the vector comes from. Where it has one part more than there are
            weights, nothing becomes of its first.
        coefficients: float32, those of the rule.
        variables: Handles of the weights, and of the rule's two other lists of
            variables, empty where it has none. All are float32.
        offsets: Where in each variable its part begins.
        rule: "sgd", "momentum", "nesterov" or "adam"; custom_ops/kernels.h says what
            they compute.
    """
    w, m, v = map(list, variables)
    operation(f"apply_{decoding.name}")(
        *decoding.arguments,
        coefficients,
        w=w,
        m=m,
        v=v,
        rule=rule,
        offsets=list(offsets),
        **decoding.attributes,
    )


def optional(tensor: tf.Tensor | None) -> list[tf.Tensor]:
    """Returns an optional argument as a list of at most one tensor."""
    return [] if tensor is None else [tensor]


def splits(row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the ends of blocks as a tensor."""
    return tf.convert_to_tensor(row_splits, tf.int64)


def _in_pieces(x: Vector | None) -> bool:
    return isinstance(x, SplitVector) and not library.gpu_is_visible()
