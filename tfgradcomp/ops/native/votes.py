"""Votes, computed natively."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.ops.native.calls import (
    operation,
    optional,
)


def majority_vote(
    words: tf.Tensor,
    count: int,
    base: int,
    reply_base: int,
    quorum: int = 0,
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes `reference.majority_vote`."""
    return operation("majority_vote")(
        words,
        optional(stream),
        count=count,
        base=base,
        reply_base=reply_base,
        quorum=quorum,
    )
