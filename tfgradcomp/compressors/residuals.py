"""Residuals as they are kept between steps: float32, or half of that memory."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.core import Context, Layout
from tfgradcomp.core.arguments import check_choice

DTYPES = ("float32", "bfloat16")
# The use of the random words; those of workers differ, the server's are shared.
_STREAM = 5


def check_residual_dtype(dtype: str) -> None:
    """Raises ValueError unless residuals can be kept in `dtype`."""
    check_choice("residual_dtype", dtype, DTYPES)


def no_residual(layout: Layout, dtype: str) -> tf.Tensor:
    """Returns the residual before the first step."""
    return tf.zeros([layout.size], dtype)


def read(residual: tf.Tensor) -> tf.Tensor:
    """Returns a residual that is kept, as float32."""
    return tf.cast(residual, tf.float32)


def kept(
    residual: tf.Tensor, dtype: str, context: Context, shared: bool = False
) -> tf.Tensor:
    """Returns a residual as it is kept.

    In bfloat16 it is rounded to one of its two neighbours at random, so that on average
    nothing is lost: what is small beside a residual of many steps would vanish each
    time if it were rounded to the nearest one.

    Args:
        residual: float32.
        dtype: One of `DTYPES`.
        context: The step.
        shared: Whether it is that of the server.
    """
    if dtype == "float32":
        return residual
    return ops.round_to_bfloat16(residual, context.random_stream(_STREAM, shared))


def waiting(
    residual: tf.Tensor, dtype: str, context: Context, shared: bool = False
) -> tf.Tensor:
    """Returns a residual that a step leaves as it is, in units of that step's rate.

    Args:
        residual: As it is kept.
        dtype: One of `DTYPES`.
        context: The step.
        shared: Whether it is that of the server.
    """
    before = read(residual)
    after = context.unless_zero_lr(context.learning_rate_ratio * before, before)
    return kept(after, dtype, context, shared)
