"""Variance-based compression: ambiguous elements wait for more examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed
from tfgradcomp.compressors.sparse_compressor import (
    SparseCompressor,
    check_unambiguity,
    moments_missing,
)
from tfgradcomp.core import Field


@dataclass(frozen=True)
class VarianceBased(SparseCompressor):
    r"""Sends an element once its square is well above its variance.

    \( r \mathrel{+}= \sum_z g_z \), \( v \mathrel{+}= \sum_z g_z^2 \) over the examples
    z of a step. Where \( r^2 > \alpha v \), r is sent, and both are zero again;
    elsewhere \( v \leftarrow \zeta v \).

    The value sent is \( \pm 2^{e-d} \), with \( e = \lfloor \log_2 \max|r| \rfloor \)
    over the selected elements of the block: |r| is truncated to \( 2^e \), or rounded
    to the nearer power of two. An element with d > 7 is not sent and keeps its
    residual. The rounding error is not kept.

    Attributes:
        alpha: \( \alpha \), 1 or more: the larger, the less is sent.
        zeta: \( \zeta \) in [0, 1], the decay of v.
        index_coding: As for `SparseCompressor`.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, VarianceBased(), Mean(VarianceBased()))
        ```

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Figure 1, Sections 4.1, 4.2 and 4.4.
    """

    alpha: float = 1.5
    zeta: float = 0.999
    index_coding: str = "fixed"

    value_bits: ClassVar[int] = 4
    needs_second_moments: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_unambiguity(self.alpha, self.zeta)

    @override
    def fields(self, layout):
        exponents = Field(layout.num_blocks, dtype="int8", per="block")
        return {"exponents": exponents, **super().fields(layout)}

    @override
    def compress(self, x, state, layout, context):
        if context.second_moments is None:
            raise ValueError(moments_missing(self))
        words, exponents, residual, variance, nonfinite = ops.pack_unambiguous(
            x,
            context.second_moments,
            state["residual"],
            state["variance"],
            self.alpha,
            self.zeta,
            layout.row_splits,
        )
        payload = {"exponents": exponents, "words": self.message(words)}
        state = {
            "residual": context.unless_zero_lr(residual, state["residual"]),
            "variance": context.unless_zero_lr(variance, state["variance"]),
        }
        return Compressed(payload, state, tf.equal(nonfinite, 0))

    @override
    def scale(self, payloads, layout):
        # The bits of a power of two; 0 for a block without elements.
        biased = tf.maximum(tf.cast(payloads["exponents"], tf.int32) + 127, 0)
        return tf.bitcast(tf.bitwise.left_shift(biased, 23), tf.float32)
