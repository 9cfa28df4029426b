"""Calls of the library's ops, by their names without the library's prefix.

The first call loads the library. It raises `library.UnavailableError` if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfgradcomp.core.split_vector import DecodeOp, SplitVector, Vector
from tfgradcomp.ops import library

# The inputs of the ops that decode a vector, in their order; an op has some of them.
# All other arguments are attributes.
_INPUTS_OF_DECODERS = ("words", "scale", "levels", "row_splits", "left", "right")


def call(
    op: str,
    arguments: dict[str, Any],
    vectors: Collection[str] = (),
    optional: Collection[str] = (),
) -> Any:
    """Calls an op and returns its output, or the named tuple of its outputs.

    Args:
        op: Name of the op.
        arguments: Inputs and attributes of the op, by name.
        vectors: Names of the arguments that may be a `SplitVector` or None, of which
            the op takes a list of tensors and a scale.
        optional: Names of other arguments that may be None, of which the op takes a
            list of at most one value.
    """
    given = dict(arguments)
    for name in vectors:
        given[name], given[f"{name}_scale"] = _parts_and_scale(given[name])
    for name in optional:
        given[name] = [] if given[name] is None else [given[name]]
    if "row_splits" in given:
        given["row_splits"] = tf.convert_to_tensor(given["row_splits"], tf.int64)
    return _op(op)(**given)


def decode(op: str, arguments: dict[str, Any], applicable: bool) -> Vector:
    """Calls an op that decodes a vector, with the arguments of its reference.

    On a GPU the op writes a single tensor, which is split afterwards. `applicable`
    makes the result usable for `apply_decoded`.
    """
    given = dict(arguments)
    sizes = given.pop("sizes")
    count = _count(given)
    writes_parts = sizes is not None and not library.gpu_is_visible()
    parts = [int(size) for size in sizes] if writes_parts else [count]
    given |= {"count": count, "num_values": len(parts), "sizes": parts}
    values = call(op, given)
    if sizes is None:
        return values[0]
    if not writes_parts:
        return SplitVector(tf.split(values[0], sizes))
    if not applicable:
        return SplitVector(values)
    if "row_splits" in given:
        given["row_splits"] = tf.convert_to_tensor(given["row_splits"], tf.int64)
    inputs = [given.pop(name) for name in _INPUTS_OF_DECODERS if name in given]
    decoding = DecodeOp(op, tuple(map(tf.convert_to_tensor, inputs)), given)
    return SplitVector(values, decoding=decoding)


def apply_decoded(
    decoding: DecodeOp,
    coefficients: tf.Tensor,
    variables: Sequence[Sequence[tf.Tensor]],
    offsets: Sequence[int],
    rule: str,
    decays: Sequence[float] | tf.Tensor = (),
) -> None:
    """Updates variables by a vector that is decoded in the same pass.

    Args:
        decoding: The decoding of the vector. If the vector has one part more than
            there are weights, its first part is ignored.
        coefficients: float32, those of the rule.
        variables: Handles of the weights, and of the rule's two other lists of
            variables, empty if the rule has none. All variables are float32.
        offsets: For each variable, the element at which its part begins.
        rule: "sgd", "momentum", "nesterov", "adam" or "frozen_adam". The formulas are
            in custom_ops/vectors.h. The coefficients of the last end with a floor for
            each variable.
        decays: float32: a rate, and the weight decay of each variable; empty: none.
    """
    w, m, v = map(list, variables)
    _op(f"apply_{decoding.name}")(
        *decoding.arguments,
        coefficients,
        w=w,
        m=m,
        v=v,
        decays=tf.convert_to_tensor(decays, tf.float32),
        rule=rule,
        offsets=list(offsets),
        **decoding.attributes,
    )


def apply_vector(
    x: SplitVector,
    coefficients: tf.Tensor,
    variables: Sequence[Sequence[tf.Tensor]],
    offsets: Sequence[int],
    rule: str,
    decays: Sequence[float] | tf.Tensor = (),
) -> None:
    """Updates variables by a vector, which is multiplied by its scale on the way.

    Args:
        x: The vector; it has a part for each of the weights.
        coefficients: As for `apply_decoded`.
        variables: As for `apply_decoded`.
        offsets: As for `apply_decoded`.
        rule: As for `apply_decoded`.
        decays: As for `apply_decoded`.
    """
    w, m, v = map(list, variables)
    _op("apply_vector")(
        list(x),
        coefficients,
        w=w,
        m=m,
        v=v,
        decays=tf.convert_to_tensor(decays, tf.float32),
        rule=rule,
        offsets=list(offsets),
        x_scale=x.scale,
    )


def _count(given: dict[str, Any]) -> int:
    """Returns the number of elements that an op decodes."""
    if "row_splits" in given:
        return int(given["row_splits"][-1])
    shapes = zip(given["rows"], given["columns"], strict=False)  # The op checks it.
    return sum(rows * (columns or 1) for rows, columns in shapes)


def _op(name: str) -> Callable:
    return getattr(library.library().operations, f"tfgradcomp_{name}")


def _parts_and_scale(x: Vector | None) -> tuple[list[tf.Tensor], float]:
    if x is None:
        return [], 1.0
    if isinstance(x, SplitVector) and not library.gpu_is_visible():
        return list(x), x.scale
    # The kernels of a GPU read a single tensor.
    return [tf.convert_to_tensor(x, tf.float32)], 1.0
