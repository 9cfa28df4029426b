"""Gradient clipping of TernGrad: block-wise, at a multiple of the deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Wrapper, checked_compress
from tfgradcomp.compressors.ternary import Ternary, prepared_for
from tfgradcomp.core import Layout

# For the standard deviation.
_SUMS = ("sum_of_squares", "sum")


@dataclass(frozen=True)
class Clip(Wrapper):
    r"""Clips each block to \( \pm c\,\sigma \) before it is compressed.

    \( f(g_k) = g_k \) if \( |g_k| \le c\sigma \), else \( \mathrm{sign}(g_k)\,c\sigma
    \), with the standard deviation \( \sigma \) of the block. The deviation is taken
    around the mean, clipping around 0. If the mean is larger than the deviation, this
    would shrink the whole block (a constant block has no deviation at all), so
    \( \sigma \) is then the root mean square. A block of one element is never clipped.

    Attributes:
        factor: c, positive and finite.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, Clip(Ternary(), 2.5), CodeSum(Ternary()))
        ```

    References:
        Wen et al., TernGrad, 2017, Eq. 21.
    """

    factor: float = 2.5

    def __post_init__(self):
        if not 0 < self.factor < math.inf:
            raise ValueError(
                "clip_factor must be positive and finite, or None for no clipping. "
                f"Received: clip_factor={self.factor}"
            )

    @override
    def transform(self, x, state, layout, context):
        statistics = ops.block_statistics(x, layout.row_splits, _SUMS)
        limit = ops.spread(self.limit(statistics, layout), layout.row_splits)
        return tf.clip_by_value(x, -limit, limit)

    @override
    def compress(self, x, state, layout, context):
        clipped = self.transform(x, state, layout, context)
        payload, state, _ = checked_compress(
            self.compressor, clipped, state, layout, context
        )
        # Whether x is finite is unknown: clipping hides an infinity.
        return Compressed(payload, state)

    @override
    def fused(self):
        return _ClippedTernary(self) if isinstance(self.compressor, Ternary) else self

    def limit(self, statistics: ops.Statistics, layout: Layout) -> tf.Tensor:
        r"""Returns \( c\sigma \) of each block, float32 `[num_blocks]`."""
        width = tf.cast(ops.widths(layout.row_splits), tf.float64)
        mean = statistics.sum / width
        mean_square = statistics.sum_of_squares / width
        # Where cancellation makes this inexact, the root mean square is taken instead.
        deviation = tf.sqrt(tf.maximum(mean_square - mean * mean, 0))
        sigma = tf.where(tf.abs(mean) > deviation, tf.sqrt(mean_square), deviation)
        limit = tf.cast(self.factor * sigma, tf.float32)
        return tf.where(width == 1, math.inf, limit)


class _ClippedTernary(Wrapper):
    """`Clip(Ternary())` in one pass over memory."""

    compressor: Clip

    @override
    def prepare(self, x, state, layout, context):
        statistics = ops.block_statistics(x, layout.row_splits, _SUMS)
        return prepared_for(statistics, self.compressor.limit(statistics, layout))

    @override
    def compress(self, x, state, layout, context):
        prepared = context.prepared or self.prepare(x, state, layout, context)
        context = context._replace(prepared=prepared)
        return self.compressor.compressor.compress(x, state, layout, context)
