"""Approximation of matrices by products of two narrow ones: PowerSGD's compressor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors import residuals
from tfgradcomp.compressors.base import (
    Compressed,
    Compressor,
    all_finite,
    mean_of_values,
)
from tfgradcomp.core import Context, Field, Fields, Layout, Vector
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.context import DRAWN_TOGETHER
from tfgradcomp.ops.normal import gaussian

# The stream of random words that the first factors are drawn from.
_STREAM = 6


class Matrices(NamedTuple):
    """The matrices among the tensors of a vector.

    Attributes:
        rows: Rows of each tensor; elements of a tensor that is sent as it is.
        columns: Columns of each tensor; 0 for a tensor that is sent as it is.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Matrices:
        """Returns the matrices that factors of a rank are shorter than.

        A tensor of shape (..., m) is a matrix of m columns. It is sent as it is if the
        rank is not below its sides, or if its factors have half of its elements.
        """
        rows, columns = [], []
        for shape in layout.known_shapes:
            size, width = math.prod(shape), shape[-1] if len(shape) > 1 else 0
            height = size // width if width else 0
            is_low = rank < min(height, width)
            if is_low and rank * (height + width) < size / 2:
                rows.append(height)
                columns.append(width)
            else:
                rows.append(size)
                columns.append(0)
        return cls(tuple(rows), tuple(columns))

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [n * (m or 1) for n, m in zip(*self, strict=True)]

    @property
    def heights(self) -> list[int]:
        """Rows of the matrices alone."""
        return [n for n, m in zip(*self, strict=True) if m]

    @property
    def widths(self) -> list[int]:
        """Columns of the matrices alone."""
        return [m for m in self.columns if m]

    @property
    def others(self) -> int:
        """Elements that are sent as they are."""
        return sum(self.rows) - sum(self.heights)

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of each tensor's left and right factors; 0 where there are none."""
        return tuple(n if m else 0 for n, m in zip(*self, strict=True)), self.columns

    def others_of(self, x: Vector) -> tf.Tensor:
        """Returns the elements of a vector that are sent as they are."""
        ends, flat = itertools.accumulate(self.sizes), tf.convert_to_tensor(x)
        others = [
            flat[end - size : end]
            for end, size, width in zip(ends, self.sizes, self.columns, strict=True)
            if not width
        ]
        return tf.concat([*others, tf.zeros([0])], 0)

    def split(self, values: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the right factors among the values of a payload, and the others."""
        sizes = [m * rank if m else n for n, m in zip(*self, strict=True)]
        parts = [*zip(tf.split(values, sizes), self.columns, strict=True)]
        factors = [part for part, width in parts if width]
        others = [part for part, width in parts if not width]
        empty = tf.zeros([0])
        return tf.concat([*factors, empty], 0), tf.concat([*others, empty], 0)

    def joined(self, factors: tf.Tensor, others: tf.Tensor, rank: int) -> tf.Tensor:
        """Returns the values that `split` splits."""
        ends = [0, 0]
        parts = []
        for height, width in zip(*self, strict=True):
            source, size = (factors, width * rank) if width else (others, height)
            begin = ends[not width]
            ends[not width] += size
            parts.append(source[begin : begin + size])
        return tf.concat(parts, 0)

    def drawn(self, counts: Sequence[int], rank: int, context: Context) -> tf.Tensor:
        """Returns normal numbers for a factor of each matrix.

        All workers draw the same numbers. A matrix draws those of its own elements, so
        that they do not depend on how vectors are cut.

        Args:
            counts: Rows of each tensor's factor; 0 where there is none.
            rank: Columns of each factor.
            context: The step.
        """
        stream = context.random_stream(_STREAM, shared=True)
        begins = [0, *itertools.accumulate(self.sizes)]
        parts = []
        for begin, count in zip(begins, counts, strict=False):
            if count:
                first, skipped = divmod(begin, DRAWN_TOGETHER)
                numbers = gaussian(stream + [0, 0, first], skipped + count * rank)
                parts.append(numbers[skipped:])
        return tf.concat(parts, 0)

    def filled(
        self, factors: tf.Tensor, counts: Sequence[int], rank: int, context: Context
    ) -> tf.Tensor:
        """Returns factors with drawn numbers in place of columns of zeros.

        Such columns would stay zero: before the first step, and after a gradient of
        zeros.

        Args:
            factors: The factors.
            counts: As for `drawn`, like `rank` and `context`.
            rank: Columns of each factor.
            context: The step.
        """
        table = tf.reshape(factors, [-1, rank])

        def search():
            of_matrix = np.repeat(np.arange(len(counts)), counts)
            maxima = tf.math.unsorted_segment_max(abs(table), of_matrix, len(counts))
            is_used = tf.gather(maxima > 0, of_matrix)

            def fill():
                numbers = tf.reshape(self.drawn(counts, rank, context), [-1, rank])
                return tf.where(is_used, table, numbers)

            return tf.cond(tf.reduce_all(is_used), lambda: table, fill)

        # The search takes longer than this, and most factors have no zero.
        has_zeros = tf.reduce_any(tf.equal(table, 0))
        return tf.reshape(tf.cond(has_zeros, search, lambda: table), [-1])


@dataclass(frozen=True)
class LowRank(Compressor):
    r"""Sends the factors of a product \( \hat P Q^\top \) near each matrix.

    A tensor of shape (..., m) is a matrix M with n rows. With a factor Q of r columns
    that all workers have, a step of the power iteration is

    \( P = \frac{1}{N} \sum_i M_i Q, \quad \hat P = \mathrm{orthonormal}(P), \quad
    Q \leftarrow \frac{1}{N} \sum_i M_i^\top \hat P. \)

    The first mean is a first round; the server takes the second. Both are linear, so
    the bytes of a worker do not grow with N. Vectors, and matrices whose factors have
    half of their elements or more, are sent as they are, with the second mean.

    Q of a step comes from the server's last reply (`FactorMean`), or from random
    numbers where there is none.

    Attributes:
        rank: r.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(0.1, momentum=0.9), LowRank(2)
        optimizer = CompressedOptimizer(
            inner, MeanErrorFeedback(c), FactorMean(c), min_size=0
        )
        ```

    References:
        Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression
        for Distributed Optimization, 2019, Algorithm 1.
    """

    needs_whole_tensors: ClassVar[bool] = True
    contracts: ClassVar[bool] = True

    rank: int = 4

    def __post_init__(self):
        check_integer("rank", self.rank, 1)

    @override
    def fields(self, layout):
        matrices = Matrices.of(layout, self.rank)
        values = self.rank * sum(matrices.widths) + matrices.others
        basis = Field(self.rank * sum(matrices.heights), shared=True)
        return {"values": Field(values), "basis": basis}

    @override
    def mean_reduced_fields(self, layout):
        heights = Matrices.of(layout, self.rank).heights
        return {"products": Field(self.rank * sum(heights))} if heights else {}

    @override
    def prepare(self, x, state, layout, context):
        matrices = Matrices.of(layout, self.rank)
        if not matrices.heights:
            return {}
        right = self.first_factors("right", layout, context)
        return _prepared(ops.multiply_matrices(x, right, *matrices, self.rank))

    def prepare_sum(
        self,
        x: Vector,
        y: tf.Tensor,
        product: Fields,
        factor: tf.Tensor,
        layout: Layout,
        context: Context,
    ) -> Fields:
        r"""Prepares \( x + f\,(y - P Q^\top) \), which is the result's `"sum"`.

        Args:
            x: The input.
            y: float32, as large as `x`.
            product: P and Q, as `no_product` names them.
            factor: f.
            layout: The tensors of the vector.
            context: The step.
        """
        matrices = Matrices.of(layout, self.rank)
        if matrices.heights and ops.can_apply():
            query = self.first_factors("right", layout, context)
            factors = product["left"], product["right"], query
            total, products = ops.multiply_sum(
                x, y, factor, *factors, *matrices, self.rank
            )
            return {"sum": total, **_prepared(products)}
        # Operations by themselves have kernels for GPUs.
        total = ops.add_scaled(x, self.without(product, y, layout), factor)
        return {"sum": total, **self.prepare(total, (), layout, context)}

    def no_product(self, layout: Layout) -> Fields:
        """Returns the factors of zeros, and zeros in place of other elements.

        Those on the right have the other elements between them.
        """
        fields = LowRank.fields(self, layout)
        left, right = fields["basis"].count, fields["values"].count
        return {"left": tf.zeros([left]), "right": tf.zeros([right])}

    def product(self, update: Vector, layout: Layout) -> Fields | None:
        """Returns a product whose factors are known, as `no_product` does, or None."""
        if not Matrices.of(layout, self.rank).heights:
            return {"left": tf.zeros([0]), "right": tf.convert_to_tensor(update)}
        found = residuals.product(update)
        return found and dict(zip(("left", "right"), found.arguments, strict=True))

    def without(self, product: Fields, x: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Returns a vector less a product, given as `no_product` is."""
        matrices = Matrices.of(layout, self.rank)
        factors = product["left"], product["right"]
        return ops.subtract_factors(x, *factors, *matrices, self.rank)

    @override
    def compress(self, x, state, layout, context):
        matrices = Matrices.of(layout, self.rank)
        if not matrices.heights:
            payload = {"values": tf.convert_to_tensor(x), "basis": tf.zeros([0])}
            return Compressed(payload, state)
        prepared = context.prepared or self.prepare(x, state, layout, context)
        products = prepared["products"]
        basis = ops.orthonormalize(products, matrices.heights, self.rank)
        values = ops.multiply_transposed(x, basis, *matrices, self.rank)
        # No element of a matrix is lost in its products: NaN and infinities stay.
        is_finite = prepared["is_finite"] & all_finite([values])
        return Compressed({"values": values, "basis": basis}, state, is_finite)

    @override
    def decompress(self, payload, layout):
        matrices = Matrices.of(layout, self.rank)
        if not matrices.heights:
            return payload["values"]
        return ops.multiply_factors(
            payload["basis"], payload["values"], *matrices, self.rank, layout.sizes
        )

    @override
    def mean(self, payloads, layout):
        # The mean of the products is the product with the mean.
        return self.decompress(mean_of_values(payloads, layout), layout)

    def first_factors(self, name: str, layout: Layout, context: Context) -> tf.Tensor:
        """Returns the factors that a step begins with.

        Args:
            name: `"left"` or `"right"`.
            layout: The tensors of the vector.
            context: The step.
        """
        matrices = Matrices.of(layout, self.rank)
        counts = matrices.counts[("left", "right").index(name)]
        if not context.server_state:
            return matrices.drawn(counts, self.rank, context)
        kept = context.server_state[name]
        return matrices.filled(kept, counts, self.rank, context)

    def kept(self, layout: Layout) -> dict[str, int]:
        """Returns the sizes of the factors that the next step begins with, by names."""
        return {"right": self.rank * sum(Matrices.of(layout, self.rank).widths)}

    def factors(self, payload: Fields, layout: Layout) -> Fields:
        """Returns these factors of a payload."""
        matrices = Matrices.of(layout, self.rank)
        return {"right": matrices.split(payload["values"], self.rank)[0]}


def _prepared(products):
    """Returns the first round's fields, and whether this worker's are finite."""
    # In the mean, another worker's numbers may be infinite.
    return {"products": products, "is_finite": all_finite([products])}
