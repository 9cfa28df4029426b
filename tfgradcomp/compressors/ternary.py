"""Stochastic ternarisation, TernGrad's compressor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, all_finite
from tfgradcomp.compressors.uniform_levels import UniformLevels
from tfgradcomp.core import Context, Field, Layout, SplitVector, State


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
            "scale": Field(layout.num_blocks, per="block"),
        }

    @override
    def max_reduced_fields(self, layout):
        scale = Field(layout.num_blocks, per="block")
        return {"scale": scale} if self.share_scaler else {}

    @override
    def prepare(self, x, state, layout, context):
        return self.prepare_clipped(x, None, layout)

    def prepare_clipped(
        self, x: tf.Tensor | SplitVector, limit: Callable | None, layout: Layout
    ) -> dict[str, tf.Tensor]:
        """Returns the scales of `x`, and whether it is finite, in one pass over memory.

        Args:
            x: The vector.
            limit: Function from the `tfgradcomp.ops.Statistics` of the blocks to the
                greatest magnitude of each, float32 `[num_blocks]`. None: no limit.
            layout: The blocks.
        """
        statistics = ops.block_statistics(x, layout.row_splits)
        if limit is None:
            limits = tf.fill([layout.num_blocks], math.inf)
        else:
            limits = limit(statistics)
        return {
            "scale": tf.minimum(tf.cast(statistics.maximum, tf.float32), limits),
            "limit": limits,
            "nonfinite": statistics.nonfinite,
        }

    @override
    def compress(self, x, state, layout, context):
        prepared = context.prepared or self.prepare(x, state, layout, context)
        return self.compress_prepared(x, state, prepared, layout, context)

    def compress_prepared(
        self,
        x: tf.Tensor | SplitVector,
        state: State,
        prepared: dict[str, tf.Tensor],
        layout: Layout,
        context: Context,
    ) -> Compressed:
        """Compresses `x`, clipped to the limits and scales of `prepare_clipped`."""
        scale = prepared["scale"]
        codes = ops.pack_ternary(
            x,
            prepared["limit"],
            scale,
            layout.row_splits,
            context.random_stream(),
        )
        # A shared scale may be infinite because of another worker.
        own = tf.reduce_all(tf.equal(prepared["nonfinite"], 0))
        payload = {"codes": codes, "scale": scale}
        return Compressed(payload, state, own & all_finite([scale]))

    @property
    @override
    def step(self):
        return 1

    @override
    def scale(self, payload, layout):
        return payload["scale"]
