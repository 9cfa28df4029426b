"""Stochastic ternarisation, TernGrad's compressor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compressors.base import Field, all_finite
from tfgradcomp.compressors.levels import EvenLevels


@dataclass(frozen=True)
class Ternary(EvenLevels):
    r"""Rounds each element at random to \( -s, 0 \) or \( s \), without bias.

    \( \tilde g = s \cdot \mathrm{sign}(g) \circ b \), \( P(b_k = 1) = |g_k| / s \),
    \( s = \max_k |g_k| \) over the block, so \( E[\tilde g] = g \). A code is
    \( \mathrm{sign}(g_k)\,b_k + 1 \).

    Attributes:
        share_scaler: Takes for s the maximum over all workers, so that the server can
            add codes as integers.

    References:
        Wen et al., TernGrad, 2017, Eq. 1 to 4.
    """

    share_scaler: bool = True

    def fields(self, layout):
        """See `Compressor.fields`."""
        return {
            "codes": Field(layout.size, base=3, per="element"),
            "scale": Field(layout.num_blocks, per="block"),
        }

    def agreed(self, layout):
        """See `Compressor.agreed`."""
        scale = Field(layout.num_blocks, per="block")
        return {"scale": scale} if self.share_scaler else {}

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        return self.compress_checked(x, state, layout, context)[:2]

    def compress_checked(self, x, state, layout, context):
        """See `Compressor.compress_checked`."""
        limit = tf.fill([layout.num_blocks], math.inf)
        payload, finite = self.compress_clipped(x, limit, layout, context)
        return payload, state, finite

    def compress_clipped(self, x, limit, layout, context):
        """Compresses `x` with the magnitudes of each block clipped.

        Args:
            x: The vector.
            limit: float32 `[num_blocks]`, or a function that returns it from the
                `tfgradcomp.ops.Statistics` of the blocks.
            layout: The blocks.
            context: The step.

        Returns:
            The payload, and whether it and `x` are finite.
        """
        statistics = ops.block_statistics(x, layout.row_splits)
        if callable(limit):
            limit = limit(statistics)
        scale = tf.minimum(tf.cast(statistics.maximum, tf.float32), limit)
        if self.share_scaler:
            scale = context.max(scale)
        stream = context.random_stream()
        codes = ops.pack_ternary(x, limit, scale, layout.row_splits, stream)
        # Another worker's infinity comes with a scale that they share.
        own = tf.reduce_all(tf.equal(statistics.nonfinite, 0))
        return {"codes": codes, "scale": scale}, own & all_finite([scale])

    @property
    def step(self):
        """See `EvenLevels.step`."""
        return 1

    def unit(self, payload, layout):
        """See `EvenLevels.unit`."""
        return payload["scale"]
