"""The mean of factors, which the next step begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compressors.base import mean_of_values
from tfgradcomp.compressors.low_rank import LowRank
from tfgradcomp.servers.base import Mean


@dataclass(frozen=True)
class FactorMean(Mean):
    r"""Replies the product with the mean factor, and keeps it for the next step.

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
    takes_weights: ClassVar[bool] = False

    compressor: LowRank = LowRank()

    @override
    def init(self, layout):
        sizes = self.compressor.kept(layout)
        return {name: tf.zeros([size]) for name, size in sizes.items()}

    @override
    def combine(self, payloads, state, layout, context):
        payload = mean_of_values(payloads, layout)
        reply = {"values": self.compressor.decompress(payload, layout)}
        return reply, self.compressor.factors(payload, layout)
