"""One bit an element: the sign alone, or with the mean magnitude of its block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Field


@dataclass(frozen=True)
class Sign(Compressor):
    r"""Sends \( \mathrm{sign}(x) \), bit 1 for plus.

    The sign of an exact zero (either zero) is a pseudo-random \( \pm 1 \) of seed,
    step and element, the same on all workers: a fixed choice would make the weights
    of dead units drift.

    Attributes:
        abstain_below: \( \tau \). Where it is not 0, a worker sends 0 for an element
            with \( |x| < \tau \cdot \mathrm{mean}|x| \) over its block, in base 3.

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

    def fields(self, layout):
        """See `Compressor.fields`."""
        return {"codes": Field(layout.size, base=3 if self.abstain_below else 2)}

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        coin = context.random_bits(layout.size, stream=1, shared=True) % 2
        zero = tf.equal(x, 0)
        codes = tf.where(zero, tf.cast(coin, tf.int32), tf.cast(x > 0, tf.int32))
        if self.abstain_below:
            limit = self.abstain_below * layout.map_blocks(_mean_magnitude, x)
            abstains = layout.map_blocks(lambda b, least: tf.abs(b) < least, x, limit)
            codes = tf.where(abstains, 1, 2 * codes)
        return {"codes": codes}, state

    def decompress(self, payload, layout):
        """See `Compressor.decompress`."""
        return self.mean_of_codes(payload["codes"], 1, payload, layout)

    def net_votes(self, total, count):
        """Returns the votes for plus less those for minus, from the sum of codes."""
        return total - count if self.abstain_below else 2 * total - count

    def mean_of_codes(self, total, count, payload, layout):
        """Returns the mean of the signs from the sum of `count` codes."""
        return tf.cast(self.net_votes(total, count), tf.float32) / count


@dataclass(frozen=True)
class ScaledSign(Compressor):
    r"""\( C(v) = \frac{\|v\|_1}{d}\,\mathrm{sign}(v) \) on each block of d elements.

    A contraction: \( \|C(v) - v\|^2 \le (1 - \|v\|_1^2 / (d\,\|v\|_2^2))\,\|v\|^2 \).
    It belongs inside `ErrorFeedback`. The sign of a zero is plus; what that adds is
    taken back through the residual.

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Section 3.2.
    """

    def fields(self, layout):
        """See `Compressor.fields`."""
        return {"codes": Field(layout.size, base=2), "scale": Field(layout.num_blocks)}

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        scale = layout.map_blocks(_mean_magnitude, x)
        return {"codes": tf.cast(x >= 0, tf.int32), "scale": scale}, state

    def decompress(self, payload, layout):
        """See `Compressor.decompress`."""
        return layout.map_blocks(
            lambda codes, s: tf.where(codes > 0, s, -s),
            payload["codes"],
            payload["scale"],
        )


def _mean_magnitude(block):
    magnitude = tf.abs(block)
    # Divided by the maximum first: a sum of elements near 1e38 must not overflow.
    unit = tf.reduce_max(magnitude, axis=1, keepdims=True)
    scaled = tf.math.divide_no_nan(magnitude, unit)
    return unit * tf.reduce_mean(scaled, axis=1, keepdims=True)
