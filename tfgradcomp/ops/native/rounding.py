"""Rounding at random, computed natively."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.ops.native.calls import operation


def round_to_bfloat16(x: tf.Tensor, stream: tf.Tensor) -> tf.Tensor:
    """Computes `reference.round_to_bfloat16`."""
    return operation("round_to_bfloat16")(x, stream)
