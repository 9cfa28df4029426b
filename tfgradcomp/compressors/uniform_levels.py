"""Compressors whose codes stand for evenly spaced levels."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressor
from tfgradcomp.core import Fields, Layout, Vector


class AddableCodes(Compressor):
    r"""A code c stands for \( s (k c - z) \), so that codes can be added.

    Subclasses declare the field `codes` and define step k, zero z and scale s.
    """

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Distance k of two adjacent levels, in scales."""

    @property
    @abc.abstractmethod
    def zero(self) -> int:
        """The level z that stands for 0, in scales above the lowest."""

    @abc.abstractmethod
    def scale(self, payload: Fields, layout: Layout) -> tf.Tensor:
        """Returns s, float32 `[num_blocks]`."""

    def scale_of_mean(self, payload: Fields, layout: Layout, count: int) -> tf.Tensor:
        r"""Returns \( s / N \), float32 `[num_blocks]`."""
        # Not `/`: a graph would multiply by the reciprocal instead.
        return tf.math.divide_no_nan(self.scale(payload, layout), count)

    def mean_of_codes(
        self,
        words: tf.Tensor,
        base: int | None,
        count: int,
        payload: Fields,
        layout: Layout,
    ) -> Vector:
        r"""Returns \( \frac{s}{N} (k \sum_i c_i - N z) \), the mean of N vectors.

        Args:
            words: int32 `[rows, words]`; the codes of all rows are added up.
            base: The base of the codes.
            count: N, which may be more than the number of rows.
            payload: The payload with the scale.
            layout: The blocks of the flat vector.
        """
        return ops.sum_levels(
            words,
            self.scale_of_mean(payload, layout, count),
            layout.row_splits,
            base,  # type: ignore[arg-type]
            self.step,
            count * self.zero,
            sizes=layout.sizes,
        )


@dataclass(frozen=True)
class UniformLevels(AddableCodes):
    """Codes whose lowest level is one scale below 0, such as signs."""

    @property
    @override
    def zero(self):
        return 1

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
