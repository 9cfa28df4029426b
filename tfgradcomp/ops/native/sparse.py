"""Sparse words, computed natively."""

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


def pack_unambiguous(
    x: Vector,
    moments: Vector,
    residual: tf.Tensor,
    variance: tf.Tensor,
    alpha: float,
    decay: float,
    row_splits: Sequence[int],
):
    """Computes `reference.pack_unambiguous`."""
    return tuple(
        operation("pack_unambiguous")(
            tensors(x),
            tensors(moments),
            residual,
            variance,
            splits(row_splits),
            x_scale=scale_of(x),
            moments_scale=scale_of(moments),
            alpha=alpha,
            decay=decay,
        )
    )


def pack_over_threshold(
    x: Vector,
    moments: Vector | None,
    residual: tf.Tensor,
    variance: tf.Tensor | None,
    threshold: float,
    alpha: float,
    decay: float,
):
    """Computes `reference.pack_over_threshold`."""
    words, new_residual, nonfinite, new_variance = operation("pack_over_threshold")(
        tensors(x),
        [] if moments is None else tensors(moments),
        residual,
        optional(variance),
        x_scale=scale_of(x),
        moments_scale=scale_of(moments),
        threshold=threshold,
        alpha=alpha,
        decay=decay,
    )
    return words, new_residual, new_variance[0] if new_variance else None, nonfinite


def mean_of_sparse(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Computes `reference.mean_of_sparse`."""
    return call_in_parts(
        "mean_of_sparse",
        (words, scale, splits(row_splits)),
        sizes,
        count=int(row_splits[-1]),
    )
