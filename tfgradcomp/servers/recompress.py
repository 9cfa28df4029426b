"""The second half of two-way error feedback: the mean is compressed again."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.servers.requantize import Requantize


@dataclass(frozen=True)
class Recompress(Requantize):
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

    def init(self, layout):
        """See `Server.init`."""
        return {"residual": tf.zeros([layout.size])}

    def combine(self, payloads, state, layout, context):
        """See `Server.combine`."""
        residual = state["residual"]
        p = self.compressor.mean(payloads, layout)
        p += context.learning_rate_ratio * residual
        reply, _ = self.compressor.compress(p, (), layout, context.at_server())
        left = p - self.compressor.decompress(reply, layout)
        return reply, {"residual": context.if_moving(left, residual)}
