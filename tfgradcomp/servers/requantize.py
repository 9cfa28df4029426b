"""A reply that is the mean, compressed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compressors import Compressor, RandomK
from tfgradcomp.compressors.base import checked_compress
from tfgradcomp.core import Layout
from tfgradcomp.servers.base import Server, mean_of_workers, width_of_blocks


@dataclass(frozen=True)
class Requantize(Server):
    r"""Replies \( C(\frac1N \sum_i \Delta^{(i)}) \).

    The error of C is lost; `Recompress` keeps it. Random rounding draws other
    numbers than the workers, equal wherever the server is, so the reply of an unbiased
    C is unbiased.

    Attributes:
        compressor: C, stateless, of both the payloads and the reply.

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Section 4 (b).
    """

    takes_weights: ClassVar[bool] = True

    compressor: Compressor

    def __post_init__(self):
        if tf.nest.flatten(self.compressor.init(Layout((0, 1)))):
            raise ValueError(
                "The server needs a stateless compressor, since it holds the residual "
                "itself. Expected: the compressor inside the error feedback. "
                f"Received: compressor={self.compressor}"
            )
        if isinstance(self.compressor, RandomK) and self.compressor.unbiased:
            raise ValueError(
                "The server draws the elements that the workers drew, which have been "
                "multiplied already. Expected: RandomK(ratio) for the reply. "
                f"Received: compressor={self.compressor}"
            )

    @override
    def reply_fields(self, layout, num_workers):
        return self.compressor.fields(layout)

    @property
    @override
    def is_blockwise(self):
        return self.compressor.is_blockwise

    @override
    def shard_alignment(self, layout):
        # A block must be whole where it is compressed.
        return width_of_blocks(layout) if self.is_blockwise else None

    @override
    def combine(self, payloads, state, layout, context):
        mean = mean_of_workers(self.compressor, payloads, layout, context)
        context = context.at_server()
        reply, state, _ = checked_compress(
            self.compressor, mean, state, layout, context
        )
        return reply, state

    @override
    def decompress(self, reply, layout, num_workers):
        return self.compressor.decompress(reply, layout)
