"""Second moments as they are handed to an optimizer, next to its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.compressors.base import Compressor
from tfgradcomp.compressors.sparse_compressor import moments_missing


def checked(
    moments: Sequence | None, gradients: list, compressor: Compressor, name: str
) -> list:
    """Returns a tensor or None for each gradient: None where no moment is needed.

    Args:
        moments: The argument of the optimizer called `name`.
        gradients: The gradients; a None has no moment.
        compressor: The compressor that needs moments, or needs none.
        name: Name of the optimizer.

    Raises:
        ValueError: If moments are needed and not given, or given and not needed.
    """
    if moments is None:
        if compressor.needs_second_moments:
            raise ValueError(moments_missing(compressor))
        return [None] * len(gradients)
    if not compressor.needs_second_moments:
        raise ValueError(
            f"{name} takes no second moments: its compressor needs none. Leave "
            "`second_moments` out, or use a method such as VarianceBased. "
            f"Received: compressor={compressor}"
        )
    moments = list(moments)
    if [m is None for m in moments] != [g is None for g in gradients]:
        raise ValueError(
            "second_moments must be a list with a tensor for each gradient, and None "
            f"where that is None. Received: {len(gradients)} gradients, "
            f"{len(moments)} second moments; None at "
            f"{[i for i, g in enumerate(gradients) if g is None]} and "
            f"{[i for i, m in enumerate(moments) if m is None]}"
        )
    return [m if m is None else tf.convert_to_tensor(m) for m in moments]


def multiplied(moments: list, scale: float) -> list:
    """Returns the moments of gradients that are multiplied by `scale`."""
    return [m if m is None else m * tf.cast(scale * scale, m.dtype) for m in moments]


def clip_factors(clipped: list, gradients: list) -> list:
    """Returns the factor by which clipping changed each element; 1 for a zero."""
    factors = []
    for left, gradient in zip(clipped, gradients, strict=True):
        one, is_zero = tf.ones_like(gradient), tf.equal(gradient, 0)
        factors.append(tf.where(is_zero, one, left / tf.where(is_zero, one, gradient)))
    return factors
