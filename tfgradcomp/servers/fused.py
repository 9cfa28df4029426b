"""Servers that do in one pass over memory what they are composed of."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compressors.base import Field
from tfgradcomp.compressors.sign import ScaledSign
from tfgradcomp.servers.base import Server
from tfgradcomp.servers.recompress import Recompress


def fused(server: Server) -> Server:
    """Returns a server that does the same in fewer passes, or the one given."""
    if server == Recompress(ScaledSign()):
        return _RecompressSigns(server.compressor)
    return server


class _RecompressSigns(Recompress):
    def unit(self, layout):
        """Blocks may be cut: signs need no scale, and the residual waits for it."""
        return 1

    def shard_fields(self, shard, num_workers):
        """The signs, and the sum of magnitudes of each part of a block."""
        codes = super().shard_fields(shard, num_workers)["codes"]
        sums = Field(len(shard.parts), dtype="float64", per="sum")
        return {"codes": codes, "sums": sums}

    def combine_shard(self, payloads, state, shard, context):
        """The first half of `combine`."""
        cuts = (*(part.begin - shard.begin for part in shard.parts), shard.size)
        blocks = [part.block - shard.first_block for part in shard.parts]
        codes, sums = ops.mean_sign_sums(
            payloads["codes"],
            tf.gather(payloads["scale"], tf.constant(blocks, tf.int32), axis=1),
            state["residual"],
            context.learning_rate_ratio,
            cuts,
        )
        return {"codes": codes, "sums": sums}, state

    def reply_of(self, parts, layout):
        """See `Server.reply_of`."""
        return {
            "codes": parts["codes"],
            "scale": ops.mean_of_sums(parts["sums"], layout.row_splits),
        }

    def settle(self, payloads, part, reply, state, shard, context):
        """The second half of `combine`."""
        after = shard.first_block + shard.layout.num_blocks
        residual = ops.mean_sign_residual(
            payloads["codes"],
            payloads["scale"],
            state["residual"],
            context.learning_rate_ratio,
            context.learning_rate > 0,
            part["codes"],
            reply["scale"][shard.first_block : after],
            shard.layout.row_splits,
        )
        return {"residual": residual}

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
