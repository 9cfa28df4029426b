"""One bit an element with two means a column: the quantizer of 1-bit SGD."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Compressor
from tfgradcomp.compressors.bingrad import means_of_sides
from tfgradcomp.core import Field, Layout, Vector


@dataclass(frozen=True)
class ColumnMeans(Compressor):
    r"""Sends the sign of each element, and two means of each column.

    A tensor of shape (..., m) is a matrix of m columns: those of a dense kernel are the
    weights of a unit. A tensor of one axis, or of one row, is one column. Elements of a
    column that are at least 0 become their mean, and the others become theirs; a mean
    of no elements is 0. No other pair of values loses less with these signs: this
    contracts.

    With n rows an element takes 1 + 64 / n bits.

    The sums of a column are those of `tfgradcomp.ops.block_statistics`: in float64, in
    an order that depends on the shapes alone. So the bits are the same on all
    processors, with any number of threads.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(0.1), ColumnMeans()
        optimizer = CompressedOptimizer(inner, ErrorFeedback(c), Mean(c))
        ```

    References:
        Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application
        to Data-Parallel Distributed Training of Speech DNNs, 2014, Section 3.
    """

    short_name: ClassVar[str | None] = "column_means"
    needs_whole_tensors: ClassVar[bool] = True
    contracts: ClassVar[bool] = True

    @override
    def fields(self, layout):
        columns = sum(width for _, width in _matrices(layout))
        return {"codes": Field(layout.size, base=2), "means": Field(2 * columns)}

    @override
    def compress(self, x, state, layout, context):
        matrices = _matrices(layout)
        columns, splits = _transposed(x, matrices), _splits(matrices)
        edge = tf.zeros([len(splits) - 1])
        means = tf.stack(means_of_sides(columns, edge, splits), axis=1)
        codes = ops.pack_signs(columns)
        return Compressed({"codes": codes, "means": tf.reshape(means, [-1])}, state)

    @override
    def decompress(self, payload, layout):
        return self.mean({name: v[tf.newaxis] for name, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        matrices = _matrices(layout)
        splits = _splits(matrices)
        means = tf.reshape(payloads["means"], [-1, len(splits) - 1, 2])
        columns = ops.mean_of_levels(payloads["codes"], means, splits)
        return _transposed(columns, [(m, n) for n, m in matrices])


def _matrices(layout: Layout) -> list[tuple[int, int]]:
    """Returns the rows and columns of each tensor of a vector."""
    sizes = []
    for shape in layout.known_shapes:
        size, width = math.prod(shape), shape[-1] if shape[:-1] else 1
        sizes.append((size // width, width) if width < size else (size, 1))
    return sizes


def _splits(matrices: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Returns where the columns begin and end, if they are joined."""
    heights = (n for n, m in matrices for _ in range(m))
    return (0, *itertools.accumulate(heights))


def _transposed(x: Vector, matrices: Sequence[tuple[int, int]]) -> tf.Tensor:
    """Returns a vector whose matrices, of so many rows and columns, are transposed."""
    parts = tf.split(tf.convert_to_tensor(x), [n * m for n, m in matrices])
    return tf.concat(
        [
            part if m == 1 else tf.reshape(tf.transpose(tf.reshape(part, [n, m])), [-1])
            for part, (n, m) in zip(parts, matrices, strict=True)
        ],
        0,
    )
