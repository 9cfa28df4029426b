"""One bit an element: signs, with or without the mean magnitude of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Compressor, all_finite
from tfgradcomp.compressors.uniform_levels import UniformLevels
from tfgradcomp.core import Field


@dataclass(frozen=True)
class Sign(UniformLevels):
    r"""Sends \( \mathrm{sign}(x) \), bit 1 for plus.

    The sign of an exact zero (either zero) is a pseudo-random \( \pm 1 \) of seed,
    step and element, the same on all workers: a fixed choice would make the weights
    of dead units drift.

    Attributes:
        abstain_below: \( \tau \). If it is not 0, a worker sends 0 for an element with
            \( |x| < \tau \cdot \mathrm{mean}|x| \) over its block, in base 3.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, Sign(), MajorityVote())
        ```

    References:
        Bernstein et al., signSGD, 2018, Algorithm 1 and Section 6.
    """

    abstain_below: float = 0.0

    is_scaled: ClassVar[bool] = False

    def __post_init__(self):
        if not self.abstain_below >= 0:
            raise ValueError(
                "abstain_below must be 0 or positive. "
                f"Received: abstain_below={self.abstain_below}"
            )

    @override
    def fields(self, layout):
        return {
            "codes": Field(layout.size, 3 if self.abstain_below else 2, per="element")
        }

    @override
    def compress(self, x, state, layout, context):
        stream = context.random_stream(1, shared=True)
        codes, nonfinite = ops.pack_signs_checked(x, stream)
        if self.abstain_below:
            splits = layout.row_splits
            limit = self.abstain_below * ops.mean_magnitude(x, splits)
            abstains = tf.abs(x) < ops.spread(limit, splits)
            signs = ops.unpack_codes(codes, 2, layout.size)
            codes = ops.pack_codes(tf.where(abstains, 1, 2 * signs), 3)
        return Compressed({"codes": codes}, state, tf.equal(nonfinite, 0))

    @property
    @override
    def step(self):
        return 1 if self.abstain_below else 2

    @override
    def scale(self, payload, layout):
        return tf.ones([layout.num_blocks])


@dataclass(frozen=True)
class ScaledSign(Compressor):
    r"""\( C(v) = \frac{\|v\|_1}{d}\,\mathrm{sign}(v) \) on each block of d elements.

    A contraction: \( \|C(v) - v\|^2 \le (1 - \|v\|_1^2 / (d\,\|v\|_2^2))\,\|v\|^2 \).
    It belongs inside `ErrorFeedback`. The sign of a zero is plus; the residual corrects
    that error.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(
            inner, ErrorFeedback(ScaledSign()), Mean(ScaledSign())
        )
        ```

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Section 3.2.
    """

    short_name: ClassVar[str | None] = "scaled_sign"
    contracts: ClassVar[bool] = True

    @override
    def fields(self, layout):
        return {
            "codes": Field(layout.size, base=2, per="element"),
            "scale": Field(layout.num_blocks, per="block"),
        }

    @override
    def compress(self, x, state, layout, context):
        scale = ops.mean_magnitude(x, layout.row_splits)
        payload = {"codes": ops.pack_signs(x), "scale": scale}
        return Compressed(payload, state, scale_tells_finite(payload))

    @override
    def decompress(self, payload, layout):
        return self.mean({k: v[tf.newaxis] for k, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        return ops.mean_of_signs(
            payloads["codes"], payloads["scale"], layout.row_splits, layout.sizes
        )


def scale_tells_finite(payload: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns whether a vector was finite, judged by the mean magnitudes of its blocks.

    Magnitudes cannot cancel, so an infinity or a NaN in a block shows in its mean. The
    mean of finite magnitudes, summed in float64, does not overflow.
    """
    return all_finite([payload["scale"]])
