"""Gradient clipping of TernGrad: block-wise, at a multiple of the deviation."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Wrapper


@dataclass(frozen=True)
class Clip(Wrapper):
    r"""Clips each block to \( \pm c\,\sigma \) before it is compressed.

    \( f(g_k) = g_k \) if \( |g_k| \le c\sigma \), else \( \mathrm{sign}(g_k)\,c\sigma
    \), with the standard deviation \( \sigma \) of the block. The deviation is taken
    around the mean, clipping around 0: where the mean outweighs the deviation (a
    constant block has none at all) that would shrink the whole block, so there
    \( \sigma \) is the root mean square. A block of one element is never clipped.

    Attributes:
        factor: c, positive.

    References:
        Wen et al., TernGrad, 2017, Eq. 21.
    """

    factor: float = 2.5

    def __post_init__(self):
        if not self.factor > 0:
            raise ValueError(
                "clip_factor must be positive, or None for no clipping. "
                f"Received: clip_factor={self.factor}"
            )

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        clipped = layout.map_blocks(self._clip, x)
        return self.compressor.compress(clipped, state, layout, context)

    def _clip(self, block):
        if block.shape[1] == 1:
            return block
        # In units of the largest element, so that no square over- or underflows.
        unit = tf.reduce_max(tf.abs(block), axis=1, keepdims=True)
        scaled = tf.math.divide_no_nan(block, unit)
        mean = tf.reduce_mean(scaled, axis=1, keepdims=True)
        deviation = tf.sqrt(tf.reduce_mean(tf.square(scaled - mean), 1, keepdims=True))
        rms = tf.sqrt(tf.reduce_mean(tf.square(scaled), 1, keepdims=True))
        sigma = tf.where(tf.abs(mean) > deviation, rms, deviation)
        limit = self.factor * sigma * unit
        return tf.clip_by_value(block, -limit, limit)
