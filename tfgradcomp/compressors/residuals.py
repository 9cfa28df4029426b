"""Residuals in the type that is kept between steps: float32 or bfloat16."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.core import Context, SplitVector, Vector
from tfgradcomp.core.split_vector import DecodeOp

DTYPES = ("float32", "bfloat16")
# The stream of random words. Workers' words differ, the server's are shared.
_STREAM = 5


def read(residual: tf.Tensor) -> tf.Tensor:
    """Returns a kept residual as float32."""
    return tf.cast(residual, tf.float32)


def check_decay(decay: float) -> None:
    """Raises ValueError unless `decay` is in (0, 1]."""
    if not 0 < decay <= 1:
        raise ValueError(
            "decay must be in (0, 1]; 1 loses nothing, and without feedback a "
            f"compressor stands by itself. Received: decay={decay!r}"
        )


def factor(decay: float, context: Context) -> tf.Tensor:
    r"""Returns \( \beta\,\eta_{t-1} / \eta_t \), by which a residual is multiplied."""
    ratio = context.learning_rate_ratio
    return ratio if decay == 1 else decay * ratio


def left(p: tf.Tensor, sent: Vector) -> tf.Tensor:
    """Returns p less what was sent of it, without joining the tensors of `sent`."""
    factors = product(sent)
    if factors:
        form = (factors.attributes[name] for name in ("rows", "columns", "rank"))
        return ops.subtract_factors(p, *factors.arguments, *form)
    sent = sent if isinstance(sent, SplitVector) else SplitVector([sent])
    minus = SplitVector(sent.tensors, -sent.scale)
    return ops.add_scaled(minus, p, tf.constant(1.0))


def product(sent: Vector) -> DecodeOp | None:
    """Returns the decoding of a product of factors, which need not be in memory."""
    decoding = sent.decoding if isinstance(sent, SplitVector) else None
    return decoding if decoding and decoding.name == "multiply_factors" else None


def kept(
    residual: tf.Tensor, dtype: str, context: Context, shared: bool = False
) -> tf.Tensor:
    """Returns a float32 residual in the type in which it is kept.

    In bfloat16 it is rounded at random to a neighbour, so that nothing is lost on
    average. Rounding to the nearest number would lose every contribution that is small
    beside the residual of many steps. The server's residual is `shared`.
    """
    if dtype == "float32":
        return residual
    return ops.round_to_bfloat16(residual, context.random_stream(_STREAM, shared))


def waiting(
    residual: tf.Tensor, dtype: str, context: Context, shared: bool = False
) -> tf.Tensor:
    """Returns a kept residual that a step does not send, in units of the step's rate.

    The arguments are those of `kept`.
    """
    before = read(residual)
    after = context.unless_zero_lr(context.learning_rate_ratio * before, before)
    return kept(after, dtype, context, shared)
