"""Momentum on the worker, before compression."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import cast

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Wrapper, checked_compress
from tfgradcomp.compressors.error_feedback import ErrorFeedback, sign_feedback
from tfgradcomp.compressors.sign import ScaledSign, Sign, scale_tells_finite
from tfgradcomp.core import Context, Vector


@dataclass(frozen=True)
class _MomentumWrapper(Wrapper):
    """Compresses a vector that follows from the gradient and its momentum m.

    A subclass computes both.
    """

    momentum: float = 0.9

    @abc.abstractmethod
    def _next(self, x: Vector, state: dict) -> tf.Tensor:
        """Returns the new m."""

    @abc.abstractmethod
    def _sent(self, x: Vector, m: tf.Tensor, context: Context) -> Vector:
        """Returns the vector that is compressed, from the new m."""

    def __post_init__(self):
        check_momentum(self.momentum)

    @override
    def init(self, layout):
        return {"momentum": tf.zeros([layout.size]), "inner": super().init(layout)}

    @override
    def inner_state(self, state):
        return state["inner"]

    @override
    def transform(self, x, state, layout, context):
        x = tf.convert_to_tensor(x)
        return self._sent(x, self._next(x, state), context)

    @override
    def compress(self, x, state, layout, context):
        x = tf.convert_to_tensor(x)
        m = self._next(x, state)
        sent = self._sent(x, m, context)
        payload, inner, _ = checked_compress(
            self.compressor, sent, state["inner"], layout, context
        )
        return Compressed(payload, {"momentum": m, "inner": inner})

    @override
    def uncompressed(self):
        return replace(self, compressor=self.compressor.uncompressed())

    @override
    def uncompressed_step(self):
        return replace(self, compressor=self.compressor.uncompressed_step())


@dataclass(frozen=True)
class Momentum(_MomentumWrapper):
    r"""Compresses the moving average \( m \leftarrow \beta m + (1 - \beta) g \).

    For the first `warmup_steps` steps g itself is compressed while m accumulates.

    Attributes:
        momentum: \( \beta \) in [0, 1).
        warmup_steps: Number of steps.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, Momentum(Sign(), 0.9), MajorityVote())
        ```

    References:
        Bernstein et al., signSGD, 2018, Algorithm 2 and Appendix E.
    """

    warmup_steps: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ValueError(
                "warmup_steps must be 0, a positive integer or 'auto'. "
                f"Received: warmup_steps={self.warmup_steps!r}"
            )

    def _next(self, x, state):
        return self.momentum * state["momentum"] + (1 - self.momentum) * x

    def _sent(self, x, m, context):
        if not self.warmup_steps:
            return m
        return tf.where(context.step < self.warmup_steps, x, m)

    @override
    def fused(self):
        return _MomentumSign(self) if self.compressor == Sign() else self


@dataclass(frozen=True)
class NesterovMomentum(_MomentumWrapper):
    r"""Compresses \( \mu m + g \) after \( m \leftarrow \mu m + g \).

    The momentum is undamped and holds no learning rate.

    Attributes:
        momentum: \( \mu \) in [0, 1).

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(
            inner, NesterovMomentum(ScaledSign()), Mean(ScaledSign())
        )
        ```

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 4.
    """

    def _next(self, x, state):
        return self.momentum * state["momentum"] + x

    def _sent(self, x, m, context):
        return self.momentum * m + x

    @override
    def fused(self):
        link = self.compressor
        # `MeanErrorFeedback` is one that keeps another residual.
        if type(link) is ErrorFeedback and link.compressor == ScaledSign():
            return _NesterovSignFeedback(self)
        return self


class _MomentumSign(Wrapper):
    """`Momentum(Sign())` in one pass over memory."""

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
        # `nonfinite` also counts momenta that overflow.
        return Compressed({"codes": codes}, state, tf.equal(nonfinite, 0))


class _NesterovSignFeedback(Wrapper):
    """`NesterovMomentum(ErrorFeedback(ScaledSign()))` in one pass over memory."""

    compressor: NesterovMomentum

    @override
    def compress(self, x, state, layout, context):
        feedback = cast(ErrorFeedback, self.compressor.compressor)
        m, mu = state["momentum"], self.compressor.momentum
        payload, inner, m = sign_feedback(
            x, state["inner"], feedback, m, mu, layout, context
        )
        state = {"momentum": m, "inner": inner}
        return Compressed(payload, state, scale_tells_finite(payload))


def check_momentum(momentum: float) -> None:
    """Raises ValueError unless `momentum` is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1). Received: momentum={momentum}")


def warmup_steps_for(momentum: float) -> int:
    r"""Returns \( C(\beta) \), the warm-up that the analysis of Signum asks for.

    It is the least C from which on \( \frac{C}{2} \beta^C \le \frac{1}{1-\beta^2}
    \frac{1}{C+1} \) holds: 54 for \( \beta = 0.9 \). (It also holds for C up to 3.)

    References:
        Bernstein et al., signSGD, 2018, Appendix E.
    """
    check_momentum(momentum)

    def holds(steps):
        return steps / 2 * momentum**steps <= 1 / (1 - momentum**2) / (steps + 1)

    # C (C + 1) beta^C falls from here on.
    steps = 1 + int(2 * momentum / (1 - momentum))
    while not holds(steps):
        steps += 1
    while steps > 1 and holds(steps - 1):
        steps -= 1
    return steps
