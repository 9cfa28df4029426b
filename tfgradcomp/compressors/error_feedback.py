"""Error feedback: what compression loses is added to the next input."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from tfgradcomp.compressors import residuals
from tfgradcomp.compressors._one_pass import SignFeedback
from tfgradcomp.compressors.base import Compressed, Wrapper
from tfgradcomp.compressors.sign import ScaledSign


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    r"""Keeps the residual of any compressor C and sends it later.

    \( p = g + \frac{\eta_{t-1}}{\eta_t} e \), pushes \( \Delta = C(p) \),
    \( e \leftarrow p - \Delta \). Residual and wire agree by construction: e is what is
    left after decoding the very payload.

    C must contract (`Compressor.contracts`), or e grows without bound.
    `OptimalScale` makes any compressor contract.

    Attributes:
        compressor: C.
        residual_dtype: What e is kept in: `"float32"`, or `"bfloat16"`, rounded at
            random.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(
            inner, ErrorFeedback(TopK(0.01)), Mean(TopK(0.01))
        )
        ```

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 2.
    """

    residual_dtype: str = field(default="float32", repr=False)

    def __post_init__(self):
        residuals.check_residual_dtype(self.residual_dtype)

    @override
    def init(self, layout):
        residual = residuals.no_residual(layout, self.residual_dtype)
        return {"residual": residual, "inner": super().init(layout)}

    @override
    def inner_state(self, state):
        return state["inner"]

    @override
    def transform(self, x, state, layout, context):
        return x + context.learning_rate_ratio * residuals.read(state["residual"])

    @override
    def compress(self, x, state, layout, context):
        p = self.transform(x, state, layout, context)
        payload, inner, _ = self.compressor.compress(p, state["inner"], layout, context)
        left = p - self.compressor.decompress(payload, layout)
        residual = context.unless_zero_lr(left, residuals.read(state["residual"]))
        residual = residuals.kept(residual, self.residual_dtype, context)
        return Compressed(payload, {"residual": residual, "inner": inner})

    @override
    def uncompressed_step(self):
        return _Waiting(self.compressor.uncompressed_step(), self.residual_dtype)

    @override
    def fused(self):
        return SignFeedback(self) if self.compressor == ScaledSign() else self


class _Waiting(ErrorFeedback):
    """Sends the gradient alone; what is owed stays owed, in units of this rate."""

    @override
    def transform(self, x, state, layout, context):
        return x

    @override
    def compress(self, x, state, layout, context):
        payload, inner, _ = self.compressor.compress(x, state["inner"], layout, context)
        residual = residuals.waiting(state["residual"], self.residual_dtype, context)
        return Compressed(payload, {"residual": residual, "inner": inner})
