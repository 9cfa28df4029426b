"""Error feedback: what compression loses is added to the next input."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Wrapper


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    r"""Keeps the residual of any compressor C and sends it later.

    \( p = g + \frac{\eta_{t-1}}{\eta_t} e \), pushes \( \Delta = C(p) \),
    \( e \leftarrow p - \Delta \). Residual and wire agree by construction: e is what is
    left after decoding the very payload.

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 2.
    """

    def init(self, layout):
        """See `Compressor.init`."""
        return {"residual": tf.zeros([layout.size]), "inner": super().init(layout)}

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        residual = state["residual"]
        p = x + context.learning_rate_ratio * residual
        payload, inner = self.compressor.compress(p, state["inner"], layout, context)
        left = p - self.compressor.decompress(payload, layout)
        return payload, {"residual": context.if_moving(left, residual), "inner": inner}
