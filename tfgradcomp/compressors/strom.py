"""Strom's compression: what exceeds a threshold sends the threshold."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed
from tfgradcomp.compressors.sparse_words import SparseWords, check_threshold


@dataclass(frozen=True)
class Strom(SparseWords):
    r"""Sends \( \pm\tau \) for each element that has grown beyond it.

    \( r \mathrel{+}= g \). Where \( |r| > \tau \), \( S = \mathrm{sign}(r)\,\tau \) is
    sent, and \( r \mathrel{-}= S \).

    Attributes:
        threshold: \( \tau \), positive, in the units of a gradient.
        index_coding: As `SparseWords` has it.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, Strom(0.01), Mean(Strom(0.01)))
        ```

    References:
        Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
        2015; Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for
        Efficient Distributed Deep Learning, 2018, Section 3.
    """

    threshold: float
    index_coding: str = "fixed"

    def __post_init__(self):
        super().__post_init__()
        check_threshold(self.threshold)

    @override
    def compress(self, x, state, layout, context):
        words, residual, _, nonfinite = ops.pack_over_threshold(
            x, None, state["residual"], None, self.threshold, 1.0, 1.0
        )
        state = {"residual": context.if_moving(residual, state["residual"])}
        return Compressed({"words": self.message(words)}, state, tf.equal(nonfinite, 0))
