"""Strom's compression: a signed threshold for each residual beyond it."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from tfgradcomp.compressors.sparse_compressor import ThresholdSparsifier


@dataclass(frozen=True)
class Strom(ThresholdSparsifier):
    r"""Sends \( \pm\tau \) for each element whose residual exceeds \( \tau \).

    \( r \mathrel{+}= g \). Where \( |r| > \tau \), \( S = \mathrm{sign}(r)\,\tau \) is
    sent, and \( r \mathrel{-}= S \).

    Attributes:
        threshold: \( \tau \), positive, in the units of a gradient; or `"auto"`: a
            quantile of each block's |r| in each step (`compressors/auto_threshold.py`).
        index_coding: As for `SparseCompressor`.

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

    threshold: float | str
    index_coding: str = "fixed"

    @override
    def compress(self, x, state, layout, context):
        return self.pack(x, None, state, layout, context)
