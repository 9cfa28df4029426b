"""Scalar codebooks: fixed levels that fit a normal law, with a scale a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import BlockValues, Codebook
from tfgradcomp.core import Field
from tfgradcomp.core.arguments import check_integer

# The positive half of the levels with the least square error for a standard normal law,
# by the number of bits: each level is the mean of the numbers that are nearest to it.
_POSITIVE_LEVELS = {
    1: (0.7978845608028654,),
    2: (0.4527800346364914, 1.5104176084990943),
    3: (0.2450941789442202, 0.7560052812058741, 1.3439092785049944, 2.151945704536979),
    4: (
        0.1283950298511471,
        0.3880482994902903,
        0.6567591185324632,
        0.9423404564869609,
        1.256231197347177,
        1.6180463860218746,
        2.06901722653139,
        2.7325895709951724,
    ),
}
# The mean magnitude of a standard normal law.
_MEAN_MAGNITUDE = _POSITIVE_LEVELS[1][0]
# Below it, the levels of a block could be denormal: 2**-126 over the ratio of levels.
_LEAST_SCALE = 2.0**-120


@dataclass(frozen=True)
class ScalarCodebook(Codebook):
    r"""Rounds each element to the nearest of \( 2^b \) levels of a normal law.

    The levels \( \pm b_k \) are those with the least expected square error for a
    standard normal law, times a scale \( \sigma = \sqrt{\pi/2}\,\|v\|_1 / d \) of each
    block of d elements: the deviation of a normal law with this mean magnitude. For
    normal elements the error is 0.363, 0.1175, 0.0345 and 0.0095 of \( \|v\|^2 \) with
    1 to 4 bits. A 1-bit codebook is `ScaledSign`.

    Rounding is deterministic and biased, so this belongs inside `ErrorFeedback`. It
    contracts, whatever the elements are: \( \min_k (|v_j| - b_k)^2 - v_j^2 \) is a
    concave function of \( |v_j| \), so its mean over a block is at most its value at
    the mean magnitude. With 2 bits \( \|C(v) - v\|^2 \le \|v\|^2 - 0.81\,\|v\|_1^2 / d
    \). A scale from the mean square would not give that: of a block with a single large
    element, all others would become a level of their own.

    Attributes:
        bits: b, 1 to 4. A word holds 32, 16, 10 or 8 codes.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(0.1), ScalarCodebook(bits=2)
        optimizer = CompressedOptimizer(inner, ErrorFeedback(c), Recompress(c))
        ```

    References:
        Lloyd, Least Squares Quantization in PCM, 1982. Max, Quantizing for Minimum
        Distortion, 1960, Table I.
    """

    short_name: ClassVar[str | None] = "scalar_codebook"
    contracts: ClassVar[bool] = True

    bits: int = 2

    def __post_init__(self):
        check_integer("bits", self.bits, 1, 5)

    @property
    @override
    def count(self):
        return 2**self.bits

    @property
    def levels(self) -> np.ndarray:
        """The levels for a standard normal law, ascending, float64 `[count]`."""
        positive = np.array(_POSITIVE_LEVELS[self.bits])
        return np.concatenate([-positive[::-1], positive])

    @override
    def block_fields(self, layout):
        return {"scale": Field(layout.num_blocks, per="block")}

    @override
    def block_values(self, x, layout):
        statistics = ops.block_statistics(x, layout.row_splits, ("l1",))
        mean = ops.mean_of_sums(statistics.l1, layout.row_splits)
        # The scale that travels is the largest level, so that an overflow is noticed.
        scale = mean * (self.levels[-1] / _MEAN_MAGNITUDE)
        scale = tf.where(scale < _LEAST_SCALE, 0.0, scale)
        edges = (self.levels[1:] + self.levels[:-1]) / 2
        thresholds = self._times(scale, edges)
        return BlockValues({"scale": scale}, statistics.nonfinite, thresholds)

    @override
    def table(self, payloads, layout):
        return self._times(payloads["scale"], self.levels)

    def _times(self, scale, levels):
        """Returns levels of a standard normal law times scales, `[..., levels]`."""
        unit = tf.constant(levels / self.levels[-1], tf.float32)
        return scale[..., tf.newaxis] * unit
