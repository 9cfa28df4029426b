"""Chains of compressors in one pass over memory.

What a chain computes link by link, native operations compute at once: the same payload,
the same state, the same bits. `fused` finds them; nobody else needs to know.
"""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressor, Wrapper
from tfgradcomp.compressors.clip import Clip
from tfgradcomp.compressors.error_feedback import ErrorFeedback
from tfgradcomp.compressors.momentum import Momentum, NesterovMomentum
from tfgradcomp.compressors.sign import ScaledSign, Sign, scale_tells_finite
from tfgradcomp.compressors.ternary import Ternary


def fused(compressor: Compressor) -> Compressor:
    """Returns a compressor that does the same in fewer passes, or the one given."""
    signs = ErrorFeedback(ScaledSign())
    if isinstance(compressor, Momentum):
        if compressor.compressor == Sign():
            return _MomentumSign(compressor)
    if isinstance(compressor, Clip):
        if isinstance(compressor.compressor, Ternary):
            return _ClippedTernary(compressor)
    if compressor == signs:
        return _SignFeedback(compressor)
    if isinstance(compressor, NesterovMomentum) and compressor.compressor == signs:
        return _NesterovSignFeedback(compressor)
    return compressor


class _Fused(Wrapper):
    def compress(self, x, state, layout, context):
        return self.compress_checked(x, state, layout, context)[:2]


class _MomentumSign(_Fused):
    def compress_checked(self, x, state, layout, context):
        """`Momentum(Sign())`."""
        codes, m, nonfinite = ops.pack_momentum_signs(
            x,
            state["momentum"],
            self.compressor.momentum,
            context.step < self.compressor.warmup_steps,
            context.random_stream(1, shared=True),
        )
        # A momentum that overflows is the gradient's fault as well.
        return {"codes": codes}, {**state, "momentum": m}, tf.equal(nonfinite, 0)


class _ClippedTernary(_Fused):
    def compress_checked(self, x, state, layout, context):
        """`Clip(Ternary())`."""
        clip, ternary = self.compressor, self.compressor.compressor
        payload, finite = ternary.compress_clipped(
            x, lambda statistics: clip.limit(statistics, layout), layout, context
        )
        return payload, state, finite


class _SignFeedback(_Fused):
    def compress_checked(self, x, state, layout, context):
        """`ErrorFeedback(ScaledSign())`."""
        payload, _, residual = _feed_back(
            x, None, state["residual"], 0.0, layout, context
        )
        state = {**state, "residual": residual}
        return payload, state, scale_tells_finite(payload)


class _NesterovSignFeedback(_Fused):
    def compress_checked(self, x, state, layout, context):
        """`NesterovMomentum(ErrorFeedback(ScaledSign()))`."""
        inner = state["inner"]
        payload, m, residual = _feed_back(
            x,
            state["momentum"],
            inner["residual"],
            self.compressor.momentum,
            layout,
            context,
        )
        state = {"momentum": m, "inner": {**inner, "residual": residual}}
        return payload, state, scale_tells_finite(payload)


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
