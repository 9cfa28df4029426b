"""The hybrid of variance-based and Strom's compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from tfgradcomp.compressors.sparse_compressor import (
    ThresholdSparsifier,
    check_unambiguity,
    moments_missing,
)


@dataclass(frozen=True)
class Hybrid(ThresholdSparsifier):
    r"""Sends \( \pm\tau \) for elements beyond it that are well above their variance.

    \( r \mathrel{+}= \sum_z g_z \), \( v \mathrel{+}= \sum_z g_z^2 \) over the examples
    z of a step. Where \( |r| > \tau \) and \( r^2 > \alpha v \),
    \( S = \mathrm{sign}(r)\,\tau \) is sent, \( v \leftarrow
    \max(v - 2|r|\tau + \tau^2, 0) \), as \( a^2 \) becomes \( (a - b)^2 \), and then
    \( r \mathrel{-}= S \). Everywhere \( v \leftarrow \zeta v \).

    Attributes:
        threshold: \( \tau \), positive, in the units of a gradient; or `"auto"`: in
            each step and block, the threshold that reduces the squares of the
            unambiguous residual most (`compressors/auto_threshold.py`).
        alpha: \( \alpha \), 1 or more: the larger, the less is sent.
        zeta: \( \zeta \) in [0, 1], the decay of v.
        index_coding: As for `SparseCompressor`.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, Hybrid(0.1), Mean(Hybrid(0.1)))
        ```

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Figure 2 and Section 4.5, whose r in the new
        v is that from before the sending.
    """

    threshold: float | str
    alpha: float = 2.0
    zeta: float = 0.999
    index_coding: str = "fixed"

    needs_second_moments: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_unambiguity(self.alpha, self.zeta)

    @override
    def is_due(self, state):
        is_unambiguous = np.square(state["residual"]) > self.alpha * state["variance"]
        return super().is_due(state) & is_unambiguous

    @override
    def compress(self, x, state, layout, context):
        if context.second_moments is None:
            raise ValueError(moments_missing(self))
        moments = context.second_moments
        return self.pack(x, moments, state, layout, context, self.alpha, self.zeta)
