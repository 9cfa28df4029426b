"""Error feedback: the error of a compression is added to the next input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors import residuals
from tfgradcomp.compressors.base import Compressed, Wrapper, checked_compress
from tfgradcomp.compressors.low_rank import LowRank
from tfgradcomp.compressors.sign import ScaledSign, scale_tells_finite
from tfgradcomp.core import Context, Fields, Layout, State, Vector
from tfgradcomp.core.arguments import check_choice


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    r"""Keeps the residual of any compressor C and sends it later.

    \( p = g + \beta \frac{\eta_{t-1}}{\eta_t} e \), pushes \( \Delta = C(p) \),
    \( e \leftarrow p - \Delta \). The residual e is computed from the decoded payload,
    so that it always agrees with what was sent.

    With \( \beta < 1 \) a contribution that has waited for t steps counts \( \beta^t
    \): what is old is forgotten, and e stays small. In a step that compresses nothing,
    e waits as it is.

    C must contract (`Compressor.contracts`), or e grows without bound.
    `OptimalScale` makes any compressor contract.

    Attributes:
        compressor: C.
        residual_dtype: Type of e: `"float32"`, or `"bfloat16"`, rounded at random.
        decay: \( \beta \) in (0, 1]; 1 loses nothing.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(
            inner, ErrorFeedback(TopK(0.01)), Mean(TopK(0.01))
        )
        ```

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 2. The decay: Sarfi, Thérien, Lidin, Belilovsky,
        Communication Efficient LLM Pre-training with SparseLoCo, 2025, Algorithm 1.
    """

    residual_dtype: str = field(default="float32", repr=False)
    # Saved files compare policies by their `repr`, which is that of version 0.2.
    decay: float = field(default=1.0, repr=False)

    def __post_init__(self):
        check_choice("residual_dtype", self.residual_dtype, residuals.DTYPES)
        residuals.check_decay(self.decay)

    @override
    def init(self, layout):
        residual = tf.zeros([layout.size], self.residual_dtype)
        return {"residual": residual, "inner": super().init(layout)}

    @override
    def inner_state(self, state):
        return state["inner"]

    def residual(self, state: State, layout: Layout) -> tf.Tensor:
        """Returns e, float32."""
        return residuals.read(state["residual"])

    @override
    def transform(self, x, state, layout, context):
        residual = self.residual(state, layout)
        return ops.add_scaled(x, residual, residuals.factor(self.decay, context))

    @override
    def compress(self, x, state, layout, context):
        p = self.transform(x, state, layout, context)
        payload, inner, _ = checked_compress(
            self.compressor, p, state["inner"], layout, context
        )
        left = residuals.left(p, self.compressor.decompress(payload, layout))
        residual = context.unless_zero_lr(left, residuals.read(state["residual"]))
        residual = residuals.kept(residual, self.residual_dtype, context)
        return Compressed(payload, {"residual": residual, "inner": inner})

    def waiting(self, state: State, layout: Layout, context: Context) -> dict:
        """Returns this part of the state after a step in which e waits."""
        residual = residuals.waiting(state["residual"], self.residual_dtype, context)
        return {"residual": residual}

    @override
    def uncompressed_step(self):
        return _Waiting(self.compressor.uncompressed_step(), self)

    @override
    def fused(self):
        return _SignFeedback(self) if self.compressor == ScaledSign() else self


@dataclass(frozen=True)
class MeanErrorFeedback(ErrorFeedback):
    r"""Keeps what the workers' common update lacks of this worker's input.

    \( p = g + \beta \frac{\eta_{t-1}}{\eta_t} e \), pushes \( \Delta = C(p) \),
    \( e \leftarrow p - u \) with the update u that all workers apply. So the mean of
    all e is what is missing in u, whatever C does.

    If C is `LowRank`, the state is p and the factors of u: e is computed where the next
    step reads p, which spares a pass over memory.

    Attributes:
        compressor: C.
        residual_dtype: `"float32"`.
        decay: As for `ErrorFeedback`.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(0.1), TopK(0.01)
        optimizer = CompressedOptimizer(inner, MeanErrorFeedback(c), Mean(c))
        ```

    References:
        Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression
        for Distributed Optimization, 2019, Algorithm 2.
    """

    hears_reply: ClassVar[bool] = True

    def __post_init__(self):
        check_choice("residual_dtype", self.residual_dtype, ("float32",))
        residuals.check_decay(self.decay)

    @override
    def init(self, layout):
        return super().init(layout) | self._no_update(layout)

    @override
    def residual(self, state, layout):
        c, p = self.compressor, super().residual(state, layout)
        return c.without(state["update"], p, layout) if isinstance(c, LowRank) else p

    @override
    def waiting(self, state, layout, context):
        state = {"residual": self.residual(state, layout)}
        return super().waiting(state, layout, context) | self._no_update(layout)

    @override
    def compress(self, x, state, layout, context):
        p = self.transform(x, state, layout, context)
        return self.compress_sum(p, state, layout, context)

    def compress_sum(
        self, p: tf.Tensor, state: State, layout: Layout, context: Context
    ) -> Compressed:
        """Compresses p, the sum with the residual."""
        compressed = checked_compress(
            self.compressor, p, state["inner"], layout, context
        )
        waiting = context.unless_zero_lr(p, state["residual"])
        return compressed._replace(
            state={**state, "residual": waiting, "inner": compressed.state}
        )

    @override
    def received(self, state, update, layout, context):
        state = super().received(state, update, layout, context)
        c = self.compressor
        product = c.product(update, layout) if isinstance(c, LowRank) else None
        if product:
            new = {"residual": state["residual"], "update": product}
        else:
            left = residuals.left(state["residual"], update)
            new = {"residual": left} | self._no_update(layout)
        return state | context.unless_zero_lr(new, {name: state[name] for name in new})

    @override
    def fused(self):
        c = self.compressor
        return _LowRankFeedback(self, c) if type(c) is LowRank else self

    def _no_update(self, layout):
        """Returns the factors of a state whose residual is e itself."""
        c = self.compressor
        return {"update": c.no_product(layout)} if isinstance(c, LowRank) else {}


@dataclass(frozen=True)
class _Waiting(Wrapper):
    """Sends the gradient alone; the residual waits, in units of this step's rate."""

    feedback: ErrorFeedback

    @override
    def init(self, layout):
        return self.feedback.init(layout)

    @override
    def inner_state(self, state):
        return state["inner"]

    @override
    def transform(self, x, state, layout, context):
        return x

    @override
    def compress(self, x, state, layout, context):
        payload, inner, _ = checked_compress(
            self.compressor, x, state["inner"], layout, context
        )
        waiting = self.feedback.waiting(state, layout, context)
        return Compressed(payload, {**waiting, "inner": inner})


class _SignFeedback(Wrapper):
    """`ErrorFeedback(ScaledSign())` in one pass over memory."""

    compressor: ErrorFeedback

    @override
    def compress(self, x, state, layout, context):
        feedback = self.compressor
        payload, state, _ = sign_feedback(
            x, state, feedback, None, 0.0, layout, context
        )
        return Compressed(payload, state, scale_tells_finite(payload))


@dataclass(frozen=True)
class _LowRankFeedback(Wrapper):
    """`MeanErrorFeedback(low_rank)` that reads each sum from memory once less."""

    compressor: MeanErrorFeedback
    low_rank: LowRank

    @override
    def prepare(self, x, state, layout, context):
        ratio = residuals.factor(self.compressor.decay, context)
        return self.low_rank.prepare_sum(
            x, state["residual"], state["update"], ratio, layout, context
        )

    @override
    def compress(self, x, state, layout, context):
        prepared = context.prepared or self.prepare(x, state, layout, context)
        context = context._replace(prepared=prepared)
        return self.compressor.compress_sum(prepared["sum"], state, layout, context)


def sign_feedback(
    x: Vector,
    state: dict,
    feedback: ErrorFeedback,
    momentum: tf.Tensor | None,
    mu: float,
    layout: Layout,
    context: Context,
) -> tuple[Fields, dict, tf.Tensor | None]:
    r"""Returns the payload of scaled signs, the new state and the new momentum.

    `feedback` is an `ErrorFeedback(ScaledSign())` in this state; `momentum` is m, or
    None. The scale shows whether x is finite: \( p = \mu m' + x +
    \beta \frac{\eta_{t-1}}{\eta_t} e \) with \( m' = \mu m + x \) is infinite or NaN
    wherever x is.
    """
    codes, scale, momentum, residual = ops.sign_error_feedback(
        x,
        momentum,
        residuals.read(state["residual"]),
        mu,
        residuals.factor(feedback.decay, context),
        context.moves,
        layout.row_splits,
    )
    residual = residuals.kept(residual, feedback.residual_dtype, context)
    payload = {"codes": codes, "scale": scale}
    return payload, {**state, "residual": residual}, momentum
