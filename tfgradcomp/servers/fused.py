"""Servers that do in one pass over memory what they are composed of."""

from __future__ import annotations

from tfgradcomp import ops
from tfgradcomp.compressors.sign import ScaledSign
from tfgradcomp.servers.base import Server
from tfgradcomp.servers.recompress import Recompress


def fused(server: Server) -> Server:
    """Returns a server that does the same in fewer passes, or the one given."""
    if server == Recompress(ScaledSign()):
        return _RecompressSigns(server.compressor)
    return server


class _RecompressSigns(Recompress):
    def combine(self, payloads, state, layout, context):
        """`Recompress(ScaledSign())`."""
        codes, scale, residual = ops.mean_sign_error_feedback(
            payloads["codes"],
            payloads["scale"],
            state["residual"],
            context.learning_rate_ratio,
            context.learning_rate > 0,
            layout.row_splits,
        )
        return {"codes": codes, "scale": scale}, {"residual": residual}
