"""The scale that makes any compressor contract, for error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import (
    Compressed,
    Compressor,
    Wrapper,
    checked_compress,
)
from tfgradcomp.core import Field, Layout
from tfgradcomp.ops.reference.vectors import in_parts


@dataclass(frozen=True)
class OptimalScale(Wrapper):
    r"""Multiplies a decoded payload by the factor with the least square error.

    On each block \( C(v) = c\,U(v) \) with \( c = \langle U(v), v \rangle /
    \|U(v)\|^2 \), which travels as well. For every outcome of U, \( \|C(v) - v\|^2 =
    \|v\|^2 - \langle U(v), v \rangle^2 / \|U(v)\|^2 \), so C contracts. If U is
    unbiased with a relative variance of at most \( \omega \), C keeps on average at
    least \( \|v\|^2 / (1 + \omega) \), as the fixed factor \( 1 / (1 + \omega) \) does.

    Error feedback needs a compressor that contracts. The error of an unbiased
    compressor may be larger than the gradient (three levels in a block of thousands of
    elements), and then the residual grows without bound.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        c = OptimalScale(QSGD(levels=3))
        optimizer = CompressedOptimizer(inner, ErrorFeedback(c), Mean(c))
        ```

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Definition 1: compressors that contract.
    """

    registered_name: ClassVar[str | None] = "Fitted"
    contracts: ClassVar[bool] = True

    def __post_init__(self):
        if tf.nest.flatten(self.compressor.init(Layout((0, 1)))):
            raise ValueError(
                "OptimalScale takes a stateless compressor; error feedback and "
                f"momentum go around it. Received: compressor={self.compressor}"
            )

    @override
    def fields(self, layout):
        # In front: a field of variable length must be the last one.
        factor = Field(layout.num_blocks, per="block")
        return {"factor": factor, **super().fields(layout)}

    @override
    def transform(self, x, state, layout, context):
        return x

    @override
    def compress(self, x, state, layout, context):
        payload, state, _ = checked_compress(self.compressor, x, state, layout, context)
        y = tf.convert_to_tensor(self.compressor.decompress(payload, layout))
        splits = layout.row_splits
        statistics = ops.block_statistics(y, splits, ("sum_of_squares",))
        # Divided by the largest element, products neither overflow nor vanish.
        largest = tf.cast(statistics.maximum, tf.float32)
        unit = tf.math.divide_no_nan(y, ops.spread(largest, splits))
        sums = ops.block_statistics(unit * x, splits, ("sum",)).sum
        product = statistics.maximum * sums
        factor = tf.math.divide_no_nan(product, statistics.sum_of_squares)
        is_normal = largest >= np.finfo(np.float32).tiny
        factor = tf.where(is_normal, tf.cast(factor, tf.float32), 1.0)
        return Compressed({"factor": factor, **payload}, state)

    @override
    def decompress(self, payload, layout):
        inner = {name: payload[name] for name in super().fields(layout)}
        y = self.compressor.decompress(inner, layout)
        factor = ops.spread(payload["factor"], layout.row_splits)
        return in_parts(y * factor, layout.sizes)

    @override
    def mean(self, payloads, layout):
        # The mean of the wrapped compressor ignores the factors.
        return in_parts(Compressor.mean(self, payloads, layout), layout.sizes)


def contracting(compressor: Compressor) -> Compressor:
    """Returns the compressor if it contracts, else an `OptimalScale` of it."""
    return compressor if compressor.contracts else OptimalScale(compressor)
