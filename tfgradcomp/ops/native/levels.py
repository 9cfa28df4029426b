"""Levels, computed natively."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.native.calls import (
    call_in_parts,
    operation,
    optional,
    scale_of,
    splits,
    tensors,
)


def find_levels(
    x: Vector,
    row_splits: Sequence[int],
    rule: str,
    count: int,
    sweeps: int = 0,
):
    """Computes `reference.find_levels`."""
    return tuple(
        operation("find_levels")(
            tensors(x),
            splits(row_splits),
            rule=rule,
            count=count,
            sweeps=sweeps,
            x_scale=scale_of(x),
        )
    )


def pack_levels(
    x: Vector,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes `reference.pack_levels`."""
    return operation("pack_levels")(
        tensors(x), levels, splits(row_splits), optional(stream), x_scale=scale_of(x)
    )


def mean_of_levels(
    words: tf.Tensor,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Computes `reference.mean_of_levels`."""
    return call_in_parts(
        "mean_of_levels",
        (words, levels, splits(row_splits)),
        sizes,
        count=int(row_splits[-1]),
    )
