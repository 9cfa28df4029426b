"""Stochastic ternarisation, TernGrad's compressor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, all_finite
from tfgradcomp.compressors.uniform_levels import UniformLevels
from tfgradcomp.core import Field, Fields


@dataclass(frozen=True)
class Ternary(UniformLevels):
    r"""Rounds each element at random to \( -s, 0 \) or \( s \), without bias.

    \( \tilde g = s \cdot \mathrm{sign}(g) \circ b \), \( P(b_k = 1) = |g_k| / s \),
    \( s = \max_k |g_k| \) over the block, so \( E[\tilde g] = g \). A code is
    \( \mathrm{sign}(g_k)\,b_k + 1 \).

    Attributes:
        share_scaler: Whether s is the maximum over all workers, so that the server can
            add codes as integers.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, Ternary(), CodeSum(Ternary()))
        ```

    References:
        Wen et al., TernGrad, 2017, Eq. 1 to 4.
    """

    short_name: ClassVar[str | None] = "ternary"

    share_scaler: bool = True

    @override
    def fields(self, layout):
        return {
            "codes": Field(layout.size, base=3, per="element"),
            "scale": self._scale_field(layout),
        }

    @override
    def max_reduced_fields(self, layout):
        return {"scale": self._scale_field(layout)} if self.share_scaler else {}

    def _scale_field(self, layout):
        return Field(layout.num_blocks, per="block", shared=self.share_scaler)

    @override
    def prepare(self, x, state, layout, context):
        statistics = ops.block_statistics(x, layout.row_splits, sums=())
        return prepared_for(statistics, tf.fill([layout.num_blocks], math.inf))

    @override
    def compress(self, x, state, layout, context):
        prepared = context.prepared or self.prepare(x, state, layout, context)
        scale = prepared["scale"]
        codes = ops.pack_ternary(
            x,
            prepared["limit"],
            scale,
            layout.row_splits,
            context.random_stream(),
        )
        # A shared scale may be infinite because of another worker.
        is_finite = tf.reduce_all(tf.equal(prepared["nonfinite"], 0))
        payload = {"codes": codes, "scale": scale}
        return Compressed(payload, state, is_finite & all_finite([scale]))

    @property
    @override
    def step(self):
        return 1

    @override
    def scale(self, payload, layout):
        return payload["scale"]


def prepared_for(statistics: ops.Statistics, limit: tf.Tensor) -> Fields:
    """Returns the result of `Ternary.prepare` for a vector that is clipped.

    Args:
        statistics: The statistics of the blocks before clipping.
        limit: The greatest magnitude of each block, float32 `[num_blocks]`.
    """
    scale = tf.minimum(tf.cast(statistics.maximum, tf.float32), limit)
    return {"scale": scale, "limit": limit, "nonfinite": statistics.nonfinite}
