"""QSGD: random rounding to evenly spaced levels, up to the norm of the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import BlockValues, Codebook, check_levels
from tfgradcomp.compressors.uniform_levels import AddableCodes
from tfgradcomp.core import Field
from tfgradcomp.core.arguments import check_choice


@dataclass(frozen=True)
class QSGD(Codebook, AddableCodes):
    r"""Rounds each element at random to an adjacent level, without bias.

    The levels are \( \|v\| (2k / (s - 1) - 1) \), \( k = 0 \ldots s - 1 \): evenly
    spaced, zero included. The norm of each block travels. A block of zeros stays zero.

    Attributes:
        levels: s, odd, from 3 to 257. Codes take \( \log_2 s \) bits each.
        norm: `"max"`: \( \max_j |v_j| \), or `"l2"`: \( \sqrt{\sum_j v_j^2} \), which
            sends more zeros.
        share_norm: Whether \( \|v\| \) is the largest norm of all workers, so that the
            server can add codes as integers (`CodeSum`).

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, QSGD(5), Mean(QSGD(5)), block_size=512)
        ```

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding, 2017, Section 3.1; `"max"` as in Section 4.
    """

    short_name: ClassVar[str | None] = "qsgd"

    levels: int = 9
    norm: str = "max"
    share_norm: bool = False

    def __post_init__(self):
        text = "an odd integer, at least 3"
        check_levels(self.levels, text, lambda s: s >= 3 and s % 2 == 1)
        check_choice("norm", self.norm, ("max", "l2"))

    @property
    @override
    def count(self):
        return self.levels

    @override
    def block_fields(self, layout):
        return {"norm": Field(layout.num_blocks, per="block", shared=self.share_norm)}

    @override
    def max_reduced_fields(self, layout):
        return self.block_fields(layout) if self.share_norm else {}

    @override
    def prepare(self, x, state, layout, context):
        if not self.share_norm:
            return {}
        values = self.block_values(x, layout)
        return {**values.payload, "nonfinite": values.nonfinite}

    @override
    def compress(self, x, state, layout, context):
        prepared = context.prepared
        if not self.share_norm or not prepared:
            return super().compress(x, state, layout, context)
        values = BlockValues({"norm": prepared["norm"]}, prepared["nonfinite"])
        return self.encode(x, values, state, layout, context)

    @override
    def block_values(self, x, layout):
        sums = ("sum_of_squares",) if self.norm == "l2" else ()
        statistics = ops.block_statistics(x, layout.row_splits, sums)
        norm = tf.sqrt(statistics.sum_of_squares) if sums else statistics.maximum
        return BlockValues({"norm": tf.cast(norm, tf.float32)}, statistics.nonfinite)

    @override
    def table(self, payloads, layout):
        k = np.arange(self.levels)
        places = (2 * k / (self.levels - 1) - 1).astype(np.float32)
        levels = payloads["norm"][..., tf.newaxis] * places
        return _without_denormals(levels)

    # The level in the middle is 0.

    @property
    @override
    def step(self):
        return 1

    @property
    @override
    def zero(self):
        return (self.levels - 1) // 2

    @override
    def scale(self, payload, layout):
        return payload["norm"] * np.float32(2 / (self.levels - 1))

    @override
    def scale_of_mean(self, payload, layout, count):
        return _without_denormals(super().scale_of_mean(payload, layout, count))


def _without_denormals(x):
    """Replaces denormals, which only some processors treat as zeros, by zeros."""
    return tf.where(tf.abs(x) < np.finfo(np.float32).tiny, 0.0, x)
