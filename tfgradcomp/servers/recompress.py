"""The second half of two-way error feedback: the mean is compressed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors import residuals
from tfgradcomp.compressors.base import checked_compress
from tfgradcomp.compressors.sign import ScaledSign
from tfgradcomp.core import Field
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.servers.base import mean_of_workers
from tfgradcomp.servers.requantize import Requantize


@dataclass(frozen=True)
class Recompress(Requantize):
    r"""Compresses the mean, with a residual at the server.

    \( \tilde p = \frac1N \sum_i \Delta^{(i)} + \beta \frac{\eta_{t-1}}{\eta_t} \tilde
    e \), replies \( \tilde\Delta = C(\tilde p) \), \( \tilde e \leftarrow \tilde p -
    \tilde\Delta \).

    Attributes:
        compressor: C, stateless, of both the payloads and the reply.
        residual_dtype: As for `tfgradcomp.compressors.ErrorFeedback`.
        decay: \( \beta \), as for `tfgradcomp.compressors.ErrorFeedback`.

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 2.
    """

    residual_dtype: str = field(default="float32", repr=False)
    decay: float = field(default=1.0, repr=False)

    def __post_init__(self):
        super().__post_init__()
        check_choice("residual_dtype", self.residual_dtype, residuals.DTYPES)
        residuals.check_decay(self.decay)

    @override
    def init(self, layout):
        return {"residual": tf.zeros([layout.size], self.residual_dtype)}

    def _state(self, residual, context):
        dtype = self.residual_dtype
        return {"residual": residuals.kept(residual, dtype, context, shared=True)}

    @override
    def combine(self, payloads, state, layout, context):
        residual = residuals.read(state["residual"])
        mean = mean_of_workers(self.compressor, payloads, layout, context)
        p = ops.add_scaled(mean, residual, residuals.factor(self.decay, context))
        server = context.at_server()
        reply = checked_compress(self.compressor, p, (), layout, server).payload
        left = residuals.left(p, self.compressor.decompress(reply, layout))
        return reply, self._state(context.unless_zero_lr(left, residual), context)

    @override
    def wait(self, state, context):
        residual = residuals.waiting(
            state["residual"], self.residual_dtype, context, shared=True
        )
        return {"residual": residual}

    @override
    def fused(self):
        if self.compressor != ScaledSign():
            return self
        return _RecompressSigns(self.compressor, self.residual_dtype, self.decay)


class _RecompressSigns(Recompress):
    """`Recompress(ScaledSign())` in one pass over memory.

    Shards may cut a block: signs need no scale, and the residual waits for it.
    """

    takes_weights: ClassVar[bool] = False

    @override
    def shard_alignment(self, layout):
        return 1

    @override
    def shard_fields(self, shard, num_workers):
        codes = super().shard_fields(shard, num_workers)["codes"]
        sums = Field(len(shard.parts), dtype="float64", per="sum")
        return {"codes": codes, "sums": sums}

    @override
    def combine_shard(self, payloads, state, shard, context):
        cuts = (*(part.begin - shard.begin for part in shard.parts), shard.size)
        blocks = [part.block - shard.first_block for part in shard.parts]
        codes, sums = ops.mean_sign_sums(
            payloads["codes"],
            tf.gather(payloads["scale"], tf.constant(blocks, tf.int32), axis=1),
            residuals.read(state["residual"]),
            residuals.factor(self.decay, context),
            cuts,
        )
        return {"codes": codes, "sums": sums}, state

    @override
    def deferred_reply(self, layout, num_workers):
        return {"scale": self.reply_fields(layout, num_workers)["scale"]}

    @override
    def whole_reply(self, parts, layout):
        return {
            "codes": parts["codes"],
            "scale": ops.mean_of_sums(parts["sums"], layout.row_splits),
        }

    @override
    def finish_shard(self, payloads, part, reply, state, shard, context):
        after = shard.first_block + shard.layout.num_blocks
        residual = ops.mean_sign_residual(
            payloads["codes"],
            payloads["scale"],
            residuals.read(state["residual"]),
            residuals.factor(self.decay, context),
            context.moves,
            part["codes"],
            reply["scale"][shard.first_block : after],
            shard.layout.row_splits,
        )
        return self._state(residual, context)

    @override
    def combine(self, payloads, state, layout, context):
        codes, scale, residual = ops.mean_sign_error_feedback(
            payloads["codes"],
            payloads["scale"],
            residuals.read(state["residual"]),
            residuals.factor(self.decay, context),
            context.moves,
            layout.row_splits,
        )
        reply = {"codes": codes, "scale": scale}
        return reply, self._state(residual, context)
