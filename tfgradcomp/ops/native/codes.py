"""Codes and their words, computed natively."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.native.calls import (
    call_in_parts,
    operation,
    scale_of,
    splits,
    tensors,
)


def pack_codes(codes: tf.Tensor, base: int) -> tf.Tensor:
    """Computes `reference.pack_codes`."""
    return operation("pack_codes")(tf.cast(codes, tf.int32), base=base)


def unpack_codes(words: tf.Tensor, base: int, count: int) -> tf.Tensor:
    """Computes `reference.unpack_codes`."""
    return operation("unpack_codes")(words, base=base, count=count)


def pack_ternary(
    x: Vector,
    limit: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor,
) -> tf.Tensor:
    """Computes `reference.pack_ternary`."""
    return operation("pack_ternary")(
        tensors(x), limit, scale, splits(row_splits), stream, x_scale=scale_of(x)
    )


def sum_codes(
    words: tf.Tensor, base: int, count: int, sum_base: int | None = None
) -> tf.Tensor:
    """Computes `reference.sum_codes`."""
    given = [] if sum_base is None else [sum_base]
    return operation("sum_codes")(words, base=base, count=count, sum_base=given)


def sum_levels(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    base: int,
    step: int,
    zero: int,
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Computes `reference.sum_levels`."""
    return call_in_parts(
        "sum_levels",
        (words, scale, splits(row_splits)),
        sizes,
        base=base,
        count=int(row_splits[-1]),
        step=step,
        zero=zero,
    )
