"""Chains of compressors in one pass over memory.

What a chain computes link by link, native operations compute at once: the same payload,
the same state, the same bits. The chains name these classes in `Compressor.fused`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors import residuals
from tfgradcomp.compressors.base import Compressed, Wrapper
from tfgradcomp.compressors.sign import scale_tells_finite
from tfgradcomp.compressors.ternary import Ternary

if TYPE_CHECKING:
    from tfgradcomp.compressors.clip import Clip
    from tfgradcomp.compressors.error_feedback import ErrorFeedback
    from tfgradcomp.compressors.momentum import Momentum, NesterovMomentum


class OnePass(Wrapper):
    """A chain, `compressor`, that `compress` computes in one pass."""


class MomentumSign(OnePass):
    """`Momentum(Sign())` in one pass."""

    compressor: Momentum

    @override
    def compress(self, x, state, layout, context):
        codes, m, nonfinite = ops.pack_momentum_signs(
            x,
            state["momentum"],
            self.compressor.momentum,
            context.step < self.compressor.warmup_steps,
            context.random_stream(1, shared=True),
        )
        state = {**state, "momentum": m}
        # A momentum that overflows is the gradient's fault as well.
        return Compressed({"codes": codes}, state, tf.equal(nonfinite, 0))


class ClippedTernary(OnePass):
    """`Clip(Ternary())` in one pass."""

    compressor: Clip

    @override
    def prepare(self, x, state, layout, context):
        clip = self.compressor
        return cast(Ternary, clip.compressor).prepare_clipped(
            x, lambda statistics: clip.limit(statistics, layout), layout
        )

    @override
    def compress(self, x, state, layout, context):
        prepared = context.prepared or self.prepare(x, state, layout, context)
        ternary = cast(Ternary, self.compressor.compressor)
        return ternary.compress_prepared(x, state, prepared, layout, context)


class SignFeedback(OnePass):
    """`ErrorFeedback(ScaledSign())` in one pass."""

    compressor: ErrorFeedback

    @override
    def compress(self, x, state, layout, context):
        residual = residuals.read(state["residual"])
        payload, _, residual = _feed_back(x, None, residual, 0.0, layout, context)
        dtype = self.compressor.residual_dtype
        residual = residuals.kept(residual, dtype, context)
        state = {**state, "residual": residual}
        return Compressed(payload, state, scale_tells_finite(payload))


class NesterovSignFeedback(OnePass):
    """`NesterovMomentum(ErrorFeedback(ScaledSign()))` in one pass."""

    compressor: NesterovMomentum

    @override
    def compress(self, x, state, layout, context):
        inner = state["inner"]
        payload, m, residual = _feed_back(
            x,
            state["momentum"],
            residuals.read(inner["residual"]),
            self.compressor.momentum,
            layout,
            context,
        )
        feedback = cast("ErrorFeedback", self.compressor.compressor)
        residual = residuals.kept(residual, feedback.residual_dtype, context)
        state = {"momentum": m, "inner": {**inner, "residual": residual}}
        return Compressed(payload, state, scale_tells_finite(payload))


# Of x, too, the scale tells: p = mu m' + x + ratio e, m' = mu m + x, is infinite or NaN
# where x is, whatever the others are. Where only they overflow the scale is what the
# payload has of that.
def _feed_back(x, momentum, residual, mu, layout, context):
    codes, scale, momentum, residual = ops.sign_error_feedback(
        x,
        momentum,
        residual,
        mu,
        context.learning_rate_ratio,
        context.learning_rate > 0,
        layout.row_splits,
    )
    return {"codes": codes, "scale": scale}, momentum, residual
