"""The mean of factors, which the next step begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compressors.base import Identity
from tfgradcomp.compressors.low_rank import LowRank, Matrices
from tfgradcomp.servers.base import Mean


@dataclass(frozen=True)
class FactorMean(Mean):
    r"""Replies \( \hat P Q^\top \) with the mean Q, and keeps Q for the next step.

    Attributes:
        compressor: The workers' compressor.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(0.1, momentum=0.9), LowRank(2)
        optimizer = CompressedOptimizer(inner, MeanErrorFeedback(c), FactorMean(c))
        ```

    References:
        Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression
        for Distributed Optimization, 2019, Section 3 ("warm start").
    """

    read_by_workers: ClassVar[bool] = True

    compressor: LowRank = LowRank()

    @override
    def init(self, layout):
        rank = self.compressor.rank
        return {"factors": tf.zeros([rank * sum(Matrices.of(layout, rank).widths)])}

    @override
    def combine(self, payloads, state, layout, context):
        rank = self.compressor.rank
        values = Identity().mean({"values": payloads["values"]}, layout)
        payload = {"values": values, "basis": payloads["basis"][0]}
        reply = {"values": self.compressor.decompress(payload, layout)}
        matrices = Matrices.of(layout, rank)
        if not matrices.heights:
            return reply, state
        return reply, {"factors": matrices.right_factors(values, rank)}
