"""Compressors whose codes stand for evenly spaced levels."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressor
from tfgradcomp.core import Layout, SplitVector


@dataclass(frozen=True)
class UniformLevels(Compressor):
    r"""A code c stands for \( s (k c - 1) \), so sums of codes stand for sums.

    Subclasses declare the field `codes` and say what step k and scale s are.
    """

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Distance k of two adjacent levels, in scales."""

    @abc.abstractmethod
    def scale(self, payload: dict[str, tf.Tensor], layout: Layout) -> tf.Tensor:
        """Returns s, float32 `[num_blocks]`."""

    @override
    def decompress(self, payload, layout):
        base = self.fields(layout)["codes"].base
        words = payload["codes"][tf.newaxis]
        return self.mean_of_codes(words, base, 1, payload, layout)

    @override
    def mean(self, payloads, layout):
        base = self.fields(layout)["codes"].base
        words = payloads["codes"]
        scales = [
            self.scale({name: v[i] for name, v in payloads.items()}, layout)
            for i in range(words.shape[0])
        ]
        levels = tf.cast(self.step * tf.range(base) - 1, tf.float32)
        table = tf.stack(scales)[..., tf.newaxis] * levels
        return ops.mean_of_levels(words, table, layout.row_splits, layout.sizes)

    def mean_of_codes(
        self,
        words: tf.Tensor,
        base: int | None,
        count: int,
        payload: dict[str, tf.Tensor],
        layout: Layout,
    ) -> tf.Tensor | SplitVector:
        r"""Returns \( \frac{s}{N} (k \sum_i c_i - N) \), the mean of N vectors.

        Args:
            words: int32 `[rows, words]`; the codes of all rows are added up.
            base: Their base.
            count: N, however many rows its codes have been added into.
            payload: Where the scale is taken from.
            layout: The blocks of the flat vector.
        """
        # Not `/`: a graph would multiply by the reciprocal instead.
        scale = tf.math.divide_no_nan(self.scale(payload, layout), count)
        return ops.sum_levels(
            words,
            scale,
            layout.row_splits,
            base,
            self.step,
            count,
            sizes=layout.sizes,
        )
