"""Signs, computed natively."""

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


def pack_signs(x: Vector, stream: tf.Tensor | None = None) -> tf.Tensor:
    """Computes `reference.pack_signs`."""
    return pack_signs_checked(x, stream)[0]


def pack_signs_checked(x: Vector, stream: tf.Tensor | None = None):
    """Computes `reference.pack_signs_checked`."""
    return tuple(
        operation("pack_signs")(tensors(x), optional(stream), x_scale=scale_of(x))
    )


def pack_momentum_signs(
    x: Vector,
    momentum: tf.Tensor,
    beta: float,
    warming_up: tf.Tensor | bool,
    stream: tf.Tensor,
):
    """Computes `reference.pack_momentum_signs`."""
    return tuple(
        operation("pack_momentum_signs")(
            tensors(x),
            momentum,
            warming_up,
            optional(stream),
            beta=beta,
            one_minus_beta=1 - beta,
            x_scale=scale_of(x),
        )
    )


def mean_of_signs(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Computes `reference.mean_of_signs`."""
    return call_in_parts(
        "mean_of_signs",
        (words, scale, splits(row_splits)),
        sizes,
        count=int(row_splits[-1]),
    )
