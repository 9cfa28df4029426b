"""Sparsification: the largest elements with their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Compressor
from tfgradcomp.core import Field, Layout

_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the elements of largest magnitude, with their indices.

    Attributes:
        ratio: Share of the elements that is sent, in (0, 1]; at least one element.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = DistEFSGD(inner, TopK(0.01))
        ```
    """

    short_name: ClassVar[str | None] = "top_k"
    contracts: ClassVar[bool] = True

    ratio: float = 0.01

    is_blockwise: ClassVar[bool] = False

    def __post_init__(self):
        check_ratio(self.ratio)

    @override
    def fields(self, layout):
        check_size(self, layout)
        count = max(1, math.ceil(self.ratio * layout.size))
        # Base 2 at least: a code of base 1 has no digits.
        return {
            "values": Field(count),
            "indices": Field(count, base=max(2, layout.size)),
        }

    @override
    def compress(self, x, state, layout, context):
        field = self.fields(layout)["indices"]
        indices = ops.find_largest(x, field.count)
        payload = {
            "values": tf.gather(x, indices),
            "indices": ops.pack_codes(indices, field.base),
        }
        return Compressed(payload, state)

    @override
    def elements_sent(self, payload, layout):
        return self.fields(layout)["values"].count

    @override
    def decompress(self, payload, layout):
        return self.mean({k: v[tf.newaxis] for k, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        field = self.fields(layout)["indices"]
        words = tf.unstack(payloads["indices"])
        indices = [ops.unpack_codes(one, field.base, field.count) for one in words]
        return ops.mean_of_pairs(tf.stack(indices), payloads["values"], layout.size)


def check_ratio(ratio: float) -> None:
    """Raises ValueError unless a share of elements is in (0, 1]."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1]. Received: ratio={ratio}")


def check_size(compressor: Compressor, layout: Layout) -> None:
    """Raises ValueError if a vector has more elements than there are indices."""
    if layout.size > _MOST_ELEMENTS:
        raise ValueError(
            f"{type(compressor).__name__} has int32 indices, so a vector may have at "
            f"most {_MOST_ELEMENTS} elements. Exclude some variables (exclude=...). "
            f"Received: a vector of {layout.size} elements"
        )
