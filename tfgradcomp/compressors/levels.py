"""Compressors whose codes stand for evenly spaced levels."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressor, Layout
from tfgradcomp.ops import Parts


@dataclass(frozen=True)
class EvenLevels(Compressor):
    r"""A code c stands for \( s (k c - 1) \), so sums of codes stand for sums.

    Subclasses declare the field `codes` and say what step k and unit s are.
    """

    @property
    def step(self) -> int:
        """The distance of two levels, k, in units."""
        raise NotImplementedError

    def unit(self, payload: dict[str, tf.Tensor], layout: Layout) -> tf.Tensor:
        """Returns s, float32 `[num_blocks]`."""
        raise NotImplementedError

    def decompress(self, payload, layout):
        """See `Compressor.decompress`."""
        base = self.fields(layout)["codes"].base
        words = payload["codes"][tf.newaxis]
        return self.mean_of_codes(words, base, 1, payload, layout)

    def mean(self, payloads, layout):
        """See `Compressor.mean`."""
        base = self.fields(layout)["codes"].base
        words = payloads["codes"]
        units = [
            self.unit({name: v[i] for name, v in payloads.items()}, layout)
            for i in range(words.shape[0])
        ]
        levels = tf.cast(self.step * tf.range(base) - 1, tf.float32)
        table = tf.stack(units)[..., tf.newaxis] * levels
        return ops.mean_of_levels(words, table, layout.row_splits, layout.sizes)

    def mean_of_codes(
        self,
        words: tf.Tensor,
        base: int,
        count: int,
        payload: dict[str, tf.Tensor],
        layout: Layout,
    ) -> tf.Tensor | Parts:
        r"""Returns \( \frac{s}{N} (k \sum_i c_i - N) \), the mean of N vectors.

        Args:
            words: int32 `[rows, words]`; the codes of all rows are added up.
            base: Their base.
            count: N, however many rows its codes have been added into.
            payload: Where the unit is taken from.
            layout: The blocks of the flat vector.
        """
        # Not `/`: a graph would multiply by the reciprocal instead.
        scale = tf.math.divide_no_nan(self.unit(payload, layout), count)
        return ops.sum_levels(
            words,
            scale,
            layout.row_splits,
            base,
            self.step,
            count,
            sizes=layout.sizes,
        )
