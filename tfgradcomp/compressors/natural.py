"""Natural compression: random rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import BlockValues, Codebook
from tfgradcomp.core import Field

POWERS = 127
# The exponent of a block whose only level is 0.
_NOTHING = -128


@dataclass(frozen=True)
class NaturalCompression(Codebook):
    r"""Rounds each element at random to an adjacent power of two, without bias.

    An element with \( 2^a \le |v| < 2^{a+1} \) keeps its sign and becomes \( 2^{a+1}
    \) with probability \( |v| / 2^a - 1 \), else \( 2^a \); its variance is at most
    \( v^2 / 8 \). A code of 8 bits is the sign and the exponent relative to the block:
    the levels are 0 and \( \pm 2^{e+1-k} \), \( k = 0 \ldots 126 \), where \( e \) is
    the exponent of the block's largest magnitude. An element below the smallest level
    becomes that level or 0, without bias.

    The largest float32 replaces \( 2^{128} \), which is infinite, and 0 replaces
    denormal levels. A block of denormals becomes zeros.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = DistEFSGD(inner, NaturalCompression(), block_size=2048)
        ```

    References:
        Horvath, Ho, Horvath, Sahu, Canini, Richtarik, Natural Compression for
        Distributed Deep Learning, 2019, Definition 1 and Theorem 1.
    """

    short_name: ClassVar[str | None] = "natural"
    contracts: ClassVar[bool] = True

    @property
    @override
    def count(self):
        return 2 * POWERS + 1

    @override
    def block_fields(self, layout):
        return {"exponent": Field(layout.num_blocks, dtype="int8", per="block")}

    @override
    def block_values(self, x, layout):
        statistics = ops.block_statistics(x, layout.row_splits, sums=())
        largest = tf.cast(statistics.maximum, tf.float32)
        biased = tf.bitwise.right_shift(tf.bitcast(largest, tf.int32), 23)
        # The step of an infinity or NaN is skipped: any int8 will do.
        exponent = tf.where(biased > 0, tf.minimum(biased, 254) - 127, _NOTHING)
        return BlockValues(
            {"exponent": tf.cast(exponent, tf.int8)}, statistics.nonfinite
        )

    @override
    def table(self, payloads, layout):
        exponent = tf.cast(payloads["exponent"], tf.int32)[..., tf.newaxis]
        biased = tf.maximum(exponent + 128 - tf.range(POWERS), 0)
        bits = tf.where(
            biased < 255,
            tf.bitwise.left_shift(biased, 23),
            np.finfo(np.float32).max.view(np.int32),
        )
        powers = tf.bitcast(bits, tf.float32)
        negative = tf.where(bits > 0, -powers, 0.0)
        zero = tf.zeros_like(powers[..., :1])
        return tf.concat([negative, zero, tf.reverse(powers, [-1])], -1)
