"""The mean is compressed again before it travels back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Layout
from tfgradcomp.servers.base import Server


@dataclass(frozen=True)
class Requantize(Server):
    r"""Replies \( C(\frac1N \sum_i \Delta^{(i)}) \).

    What C loses is lost; `Recompress` keeps it. Random rounding draws numbers of its
    own, the same wherever the server is, so the reply of an unbiased C is unbiased.

    Attributes:
        compressor: C, of the payloads as well as of the reply; stateless.

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Section 4 (b).
    """

    compressor: Compressor

    def __post_init__(self):
        if tf.nest.flatten(self.compressor.init(Layout((0, 1)))):
            raise ValueError(
                "The server compresses by a stateless compressor and holds the "
                "residual itself; give the one inside. "
                f"Received: compressor={self.compressor}"
            )

    def reply_fields(self, layout, num_workers):
        """See `Server.reply_fields`."""
        return self.compressor.fields(layout)

    @property
    def is_blockwise(self):
        """See `Server.is_blockwise`."""
        return self.compressor.is_blockwise

    def unit(self, layout):
        """See `Server.unit`."""
        # A block must be whole where it is compressed.
        widths = {*np.diff(layout.row_splits)[:-1].tolist()}
        if len(widths) > 1 or not self.is_blockwise:
            return None
        return widths.pop() if widths else max(1, layout.size)

    def combine(self, payloads, state, layout, context):
        """See `Server.combine`."""
        mean = self.compressor.mean(payloads, layout)
        return self.compressor.compress(mean, state, layout, context.at_server())

    def decompress(self, reply, layout, num_workers):
        """See `Server.decompress`."""
        return self.compressor.decompress(reply, layout)
