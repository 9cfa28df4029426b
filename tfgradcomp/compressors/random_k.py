"""Sparsification: elements that all workers draw together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Compressor, mean_of_values
from tfgradcomp.compressors.top_k import check_ratio, check_size
from tfgradcomp.core import Field
from tfgradcomp.core.arguments import check_choice

# The stream of random words that the elements are drawn from.
_STREAM = 7


@dataclass(frozen=True)
class RandomK(Compressor):
    r"""Sends k elements, drawn at random, the same ones on all workers.

    A vector of d elements is cut into k ranges: range s from element \( \lfloor s d / k
    \rfloor \) to \( \lfloor (s + 1) d / k \rfloor \). In each step one element of each
    range is drawn, independently of the other ranges: that with index \( \lfloor w b /
    2^{32} \rfloor \) in the range, where w is the size of the range and b a random
    word of 32 bits. So the k elements differ, each element of a range is drawn with
    probability 1 / w (to a relative error below \( w / 2^{32} \)), and w is d / k,
    rounded down or up. Drawing k of all d elements would need a sort.

    All workers draw the same words, so the values alone travel, and the network may add
    them up. Servers that are no workers get the name of the random stream as well.

    What is drawn has its own value: \( E \|C(v) - v\|^2 = (1 - 1 / w) \|v\|^2 \), so C
    contracts on average, and error feedback may follow. With `unbiased` it is
    multiplied by w, so that \( E\,C(v) = v \), with a variance of \( (w - 1) v_j^2 \).

    Attributes:
        ratio: Share of the elements that is sent, in (0, 1]; at least one element.
        unbiased: Whether values are multiplied by w.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(0.1), RandomK(0.01)
        optimizer = CompressedOptimizer(inner, ErrorFeedback(c), Mean(c))
        ```

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, 2018, Definition 2.2,
        which draws any k of the d elements.
    """

    short_name: ClassVar[str | None] = "random_k"
    is_blockwise: ClassVar[bool] = False

    ratio: float = 0.01
    unbiased: bool = False

    def __post_init__(self):
        check_ratio(self.ratio)
        check_choice("unbiased", self.unbiased, (False, True))

    @property
    @override
    def contracts(self):  # type: ignore[override]
        return not self.unbiased

    def _count(self, layout):
        return max(1, math.ceil(self.ratio * layout.size))

    @override
    def fields(self, layout):
        check_size(self, layout)
        return {
            "values": Field(self._count(layout)),
            "stream": Field(3, dtype="int64", shared=True),
        }

    def _drawn(self, stream, layout):
        """Returns the indices that a stream draws, and the sizes of their ranges."""
        count = self._count(layout)
        # Products are below 2**63: indices have 31 bits, words have 32.
        edges = tf.range(count + 1, dtype=tf.int64) * layout.size // count
        sizes = edges[1:] - edges[:-1]
        words = tf.cast(ops.random_bits(stream, count), tf.int64)
        return edges[:-1] + tf.bitwise.right_shift(words * sizes, 32), sizes

    @override
    def compress(self, x, state, layout, context):
        stream = context.random_stream(_STREAM, shared=True)
        indices, sizes = self._drawn(stream, layout)
        values = tf.gather(x, indices)
        if self.unbiased:
            # Before the message, so that an overflow is noticed.
            values *= tf.cast(sizes, tf.float32)
        return Compressed({"values": values, "stream": stream}, state)

    @override
    def elements_sent(self, payload, layout):
        return self._count(layout)

    @override
    def decompress(self, payload, layout):
        indices, _ = self._drawn(payload["stream"], layout)
        values = payload["values"][tf.newaxis]
        indices = tf.cast(indices, tf.int32)[tf.newaxis]
        return ops.mean_of_pairs(indices, values, layout.size)

    @override
    def mean(self, payloads, layout):
        return self.decompress(mean_of_values(payloads, layout), layout)
