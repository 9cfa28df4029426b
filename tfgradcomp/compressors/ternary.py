"""Stochastic ternarisation, TernGrad's compressor."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Field


@dataclass(frozen=True)
class Ternary(Compressor):
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
        return {"codes": Field(layout.size, base=3), "scale": Field(layout.num_blocks)}

    def agreed(self, layout):
        """See `Compressor.agreed`."""
        return {"scale": Field(layout.num_blocks)} if self.share_scaler else {}

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        scale = layout.map_blocks(
            lambda b: tf.reduce_max(tf.abs(b), 1, keepdims=True), x
        )
        if self.share_scaler:
            scale = context.max(scale)
        probability = layout.map_blocks(
            lambda b, s: tf.math.divide_no_nan(tf.abs(b), s), x, scale
        )
        kept = context.uniform(layout.size) < probability
        codes = tf.where(kept, tf.cast(tf.sign(x), tf.int32), 0) + 1
        return {"codes": codes, "scale": scale}, state

    def decompress(self, payload, layout):
        """See `Compressor.decompress`."""
        return self.mean_of_codes(payload["codes"], 1, payload, layout)

    def mean_of_codes(self, total, count, payload, layout):
        r"""Returns \( s / N \cdot \sum_i (code_i - 1) \) from the codes' sum."""
        return layout.map_blocks(
            lambda t, s: (s / count) * tf.cast(t - count, tf.float32),
            total,
            payload["scale"],
        )
