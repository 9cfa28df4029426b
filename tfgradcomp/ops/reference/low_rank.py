"""Products with matrices of few columns, and their orthonormal columns.

A vector is the concatenation of tensors. Tensor t is a matrix of `rows[t]` rows and
`columns[t]` columns, row by row; or, if `columns[t]` is 0, `rows[t]` elements that no
product takes part in. Each matrix has a factor with `rank` columns on its left
(`rows[t]` rows) or on its right (`columns[t]` rows). The factors of all matrices are
one vector, row by row, in the order of the matrices.

A sum of n products has L lanes: product i is one of lane i % L. A lane adds its
products in their order, `LANE_STEPS` at a time, beginning with 0, and then these sums
in theirs, beginning with 0. Lanes are added by halves: lanes l and l + L/2, and so on.
L is `LANES`, for as many sums beside each other; or 1 where the columns of a matrix are
beside each other already. Products and sums are rounded to their type, so that the bits
do not depend on the processor; `tf.matmul` promises no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.residuals import add_scaled
from tfgradcomp.ops.reference.vectors import add, in_parts

LANES = 16
LANE_STEPS = 64


def multiply_matrices(
    x: Vector,
    right: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> tf.Tensor:
    r"""Returns \( M Q \) of each matrix M, the factors on the left.

    The sums have `LANES` lanes.

    Args:
        x: The matrices and the other elements, float32.
        right: Q of each matrix, float32 `[sum(columns) * rank]`.
        rows: Rows of each tensor.
        columns: Columns of each matrix; 0 for other tensors.
        rank: Columns of each factor, positive.

    Returns:
        float32, the sum of the matrices' rows, times `rank`.
    """
    factors = _factors(right, columns, rank)
    parts = _tensors(x, rows, columns)
    products = [
        _product(part, factor, LANES)
        for part, factor in zip(parts, factors, strict=True)
        if factor is not None
    ]
    return _joined(products)


def multiply_transposed(
    x: Vector,
    left: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> tf.Tensor:
    r"""Returns \( M^\top P \) of each matrix M, the factors on the right.

    The sums have one lane.

    Args:
        x: As for `multiply_matrices`, like `rows`, `columns` and `rank`.
        left: P of each matrix, float32, the sum of the matrices' rows, times `rank`.
        rows: Rows of each tensor.
        columns: Columns of each matrix; 0 for other tensors.
        rank: Columns of each factor, positive.

    Returns:
        float32: a factor for each matrix; the elements of all other tensors between
        them, as they are.
    """
    factors = _factors(left, _rows_of_matrices(rows, columns), rank)
    parts = _tensors(x, rows, columns)
    products = [
        part if factor is None else _product(tf.transpose(part), factor, lanes=1)
        for part, factor in zip(parts, factors, strict=True)
    ]
    return _joined(products)


def multiply_factors(
    left: tf.Tensor,
    right: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
    sizes: Sequence[int] | None = None,
) -> Vector:
    r"""Returns \( P Q^\top \) of each matrix, and the other elements.

    An element is the sum of `rank` products in their order.

    Args:
        left: P of each matrix, as for `multiply_transposed`.
        right: Q of each matrix and the other elements, as `multiply_transposed`
            returns them.
        rows: Rows of each tensor.
        columns: Columns of each matrix; 0 for other tensors.
        rank: Columns of each factor, positive.
        sizes: As in `in_parts`.

    Returns:
        float32, the elements of all tensors.
    """
    factors = _factors(left, _rows_of_matrices(rows, columns), rank)
    counts = [m * rank if m else n for n, m in zip(rows, columns, strict=True)]
    parts = tf.split(tf.convert_to_tensor(right), counts)
    values = _joined(
        [
            part if factor is None else _outer(factor, tf.reshape(part, [-1, rank]))
            for part, factor in zip(parts, factors, strict=True)
        ]
    )
    return in_parts(values, sizes)


def subtract_factors(
    x: tf.Tensor,
    left: tf.Tensor,
    right: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> tf.Tensor:
    r"""Returns \( M - P Q^\top \) of each matrix, and differences of other elements.

    The native op, for a CPU only, does not write the product to memory.

    Args:
        x: M of each matrix and the other elements, float32.
        left: As for `multiply_factors`, like all that follow.
        right: Q of each matrix, and what is subtracted from the other elements.
        rows: Rows of each tensor.
        columns: Columns of each matrix; 0 for other tensors.
        rank: Columns of each factor, positive.

    Returns:
        float32, as large as `x`.
    """
    return x - tf.convert_to_tensor(multiply_factors(left, right, rows, columns, rank))


def multiply_sum(
    x: Vector,
    y: tf.Tensor,
    factor: tf.Tensor,
    left: tf.Tensor,
    right: tf.Tensor,
    query: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    r"""Returns a sum, \( x + f\,(y - P R^\top) \), and \( M Q \) of its matrices M.

    The native op, for a CPU only, reads each matrix from memory once.

    Args:
        x: The matrices and the other elements, float32.
        y: float32, as large as `x`.
        factor: f, float32 scalar.
        left: P of each matrix, as for `subtract_factors`.
        right: R of each matrix, and what is subtracted from the other elements of y.
        query: Q of each matrix, as `multiply_matrices` has it on the right.
        rows: Rows of each tensor.
        columns: Columns of each matrix; 0 for other tensors.
        rank: Columns of each factor, positive.

    Returns:
        The sum, as `add_scaled` returns it, and the factors on the left.
    """
    difference = subtract_factors(y, left, right, rows, columns, rank)
    total = add_scaled(x, difference, factor)
    return total, multiply_matrices(total, query, rows, columns, rank)


def orthonormalize(x: tf.Tensor, rows: Sequence[int], rank: int) -> tf.Tensor:
    r"""Returns orthonormal columns that span those of each factor.

    Modified Gram-Schmidt in float64, by sums of `LANES` lanes, column by column: v
    loses its part along each earlier column b, \( v \leftarrow v - (b^\top v) b \),
    and becomes \( v / \|v\| \). If at most \( 10^{-10} \) of its length is left, it
    depends on the earlier columns, and what is left is an error of rounding: such a
    column becomes zero.

    Args:
        x: A factor for each matrix, float32 `[sum(rows) * rank]`.
        rows: Rows of each factor.
        rank: Columns of each factor, positive.

    Returns:
        float32, as large as `x`.
    """
    results = []
    for factor in _factors(x, rows, rank):
        basis: list[tf.Tensor] = []
        for column in tf.unstack(tf.cast(factor, tf.float64), axis=1):
            before = tf.sqrt(_dot(column, column))
            for other in basis:
                column = column - _dot(other, column) * other
            length = tf.sqrt(_dot(column, column))
            is_dependent = length <= 1e-10 * before
            unit = column / tf.where(is_dependent, tf.ones_like(length), length)
            basis.append(tf.where(is_dependent, tf.zeros_like(column), unit))
        results.append(tf.cast(tf.stack(basis, axis=1), tf.float32))
    return _joined(results)


def _rows_of_matrices(rows, columns):
    return [n if m else 0 for n, m in zip(rows, columns, strict=True)]


def _factors(factors, counts, rank):
    """Returns the factor of each tensor, `[count, rank]`; None where the count is 0."""
    parts = tf.split(tf.convert_to_tensor(factors), [count * rank for count in counts])
    return [
        tf.reshape(part, [count, rank]) if count else None
        for part, count in zip(parts, counts, strict=True)
    ]


def _tensors(x, rows, columns):
    """Returns each tensor: matrices, and vectors of other elements."""
    shapes = [[n, m] if m else [n] for n, m in zip(rows, columns, strict=True)]
    parts = tf.split(tf.convert_to_tensor(x), list(map(math.prod, shapes)))
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _joined(parts):
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def _product(matrix, factor, lanes):
    """Returns the product `[n, rank]` of a matrix `[n, m]` and a factor `[m, rank]`."""
    # A short product ends before a lane has had all its steps.
    steps = max(1, min(LANE_STEPS, math.ceil(matrix.shape[1] / lanes)))
    fill = -matrix.shape[1] % (steps * lanes)
    matrix = tf.pad(matrix, [[0, 0], [0, fill]])[..., tf.newaxis]
    factor = tf.pad(factor, [[0, fill], [0, 0]])[tf.newaxis]

    def by_step(table):
        table = tf.reshape(table, [table.shape[0], -1, steps, lanes, table.shape[2]])
        return tf.transpose(table, [2, 1, 0, 3, 4])

    matrix, factor = by_step(matrix), by_step(factor)
    shape = [*matrix.shape[1:4], factor.shape[4]]
    sums = _sum_in_order(
        lambda step: matrix[step] * factor[step], steps, shape, matrix.dtype
    )
    total = _sum_in_order(lambda i: sums[i], shape[0], shape[1:], matrix.dtype)
    while lanes > 1:
        lanes //= 2
        total = total[:, :lanes] + total[:, lanes:]
    return total[:, 0]


def _dot(a, b):
    """Returns the sum of the products of two vectors, a scalar."""
    return _product(a[tf.newaxis], b[:, tf.newaxis], LANES)[0, 0]


def _sum_in_order(term, count, shape, dtype):
    """Returns the sum of `term(index)` for indices below `count`, beginning with 0."""
    return tf.while_loop(
        lambda index, total: index < count,
        lambda index, total: (index + 1, total + term(index)),
        [tf.constant(0), tf.zeros(shape, dtype)],
        parallel_iterations=1,
    )[1]


def _outer(left, right):
    """Returns the product `[n, m]` of `[n, rank]` and the transposed `[m, rank]`."""
    total, *others = (
        a[:, tf.newaxis] * b[tf.newaxis]
        for a, b in zip(
            tf.unstack(left, axis=1), tf.unstack(right, axis=1), strict=True
        )
    )
    for product in others:
        total = add(total, product)
    return total
