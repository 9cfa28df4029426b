"""Error feedback with scaled signs, computed natively."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.native.calls import (
    operation,
    optional,
    scale_of,
    splits,
    tensors,
)


def sign_error_feedback(
    x: Vector,
    momentum: tf.Tensor | None,
    residual: tf.Tensor,
    mu: float,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """Computes `reference.sign_error_feedback`."""
    words, scale, new_residual, new_momentum = operation("sign_error_feedback")(
        tensors(x),
        residual,
        ratio,
        moving,
        splits(row_splits),
        optional(momentum),
        mu=mu,
        x_scale=scale_of(x),
    )
    return words, scale, new_momentum[0] if new_momentum else None, new_residual


def mean_sign_error_feedback(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """Computes `reference.mean_sign_error_feedback`."""
    return tuple(
        operation("mean_sign_error_feedback")(
            sent_words, sent_scale, residual, ratio, moving, splits(row_splits)
        )
    )


def mean_sign_sums(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    row_splits: Sequence[int],
):
    """Computes `reference.mean_sign_sums`."""
    return tuple(
        operation("mean_sign_sums")(
            sent_words, sent_scale, residual, ratio, splits(row_splits)
        )
    )


def mean_sign_residual(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
) -> tf.Tensor:
    """Computes `reference.mean_sign_residual`."""
    return operation("mean_sign_residual")(
        sent_words,
        sent_scale,
        residual,
        ratio,
        moving,
        words,
        scale,
        splits(row_splits),
    )
