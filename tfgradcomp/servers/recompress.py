"""The second half of two-way error feedback: the mean is compressed again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Layout
from tfgradcomp.servers.base import Server


@dataclass(frozen=True)
class Recompress(Server):
    r"""Compresses the mean with a residual of its own.

    \( \tilde p = \frac1N \sum_i \Delta^{(i)} + \frac{\eta_{t-1}}{\eta_t} \tilde e \),
    replies \( \tilde\Delta = C(\tilde p) \), \( \tilde e \leftarrow \tilde p -
    \tilde\Delta \).

    Attributes:
        compressor: C, of the payloads as well as of the reply; stateless.

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 2.
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

    def init(self, layout):
        """See `Server.init`."""
        return {"residual": tf.zeros([layout.size])}

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
        residual = state["residual"]
        p = self.compressor.mean(payloads, layout)
        p += context.learning_rate_ratio * residual
        reply, _ = self.compressor.compress(p, (), layout, context.at_server())
        left = p - self.compressor.decompress(reply, layout)
        return reply, {"residual": context.if_moving(left, residual)}

    def decompress(self, reply, layout, num_workers):
        """See `Server.decompress`."""
        return self.compressor.decompress(reply, layout)
