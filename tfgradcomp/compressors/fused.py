"""Chains of compressors in one pass over memory.

What a chain computes link by link, native operations compute at once: the same payload,
the same state, the same bits. `fused` finds them; nobody else needs to know.
"""

from __future__ import annotations

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressor, Wrapper
from tfgradcomp.compressors.clip import Clip
from tfgradcomp.compressors.error_feedback import ErrorFeedback
from tfgradcomp.compressors.momentum import Momentum, NesterovMomentum
from tfgradcomp.compressors.sign import ScaledSign, Sign
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


class _MomentumSign(Wrapper):
    def compress(self, x, state, layout, context):
        """`Momentum(Sign())`."""
        codes, m = ops.pack_momentum_signs(
            x,
            state["momentum"],
            self.compressor.momentum,
            context.step < self.compressor.warmup_steps,
            context.random_stream(1, shared=True),
        )
        return {"codes": codes}, {**state, "momentum": m}


class _ClippedTernary(Wrapper):
    def compress(self, x, state, layout, context):
        """`Clip(Ternary())`."""
        clip, ternary = self.compressor, self.compressor.compressor
        payload = ternary.compress_clipped(
            x, lambda statistics: clip.limit(statistics, layout), layout, context
        )
        return payload, state


class _SignFeedback(Wrapper):
    def compress(self, x, state, layout, context):
        """`ErrorFeedback(ScaledSign())`."""
        payload, _, residual = _feed_back(
            x, None, state["residual"], 0.0, layout, context
        )
        return payload, {**state, "residual": residual}


class _NesterovSignFeedback(Wrapper):
    def compress(self, x, state, layout, context):
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
        return payload, {"momentum": m, "inner": {**inner, "residual": residual}}


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
