"""Products with matrices of few columns, and their orthonormal columns.

A vector is the concatenation of tensors. Tensor t is a matrix of `rows[t]` rows and
`columns[t]` columns, row by row; or, if `columns[t]` is 0, `rows[t]` elements that no
product takes part in. Each matrix has a factor with `rank` columns on its left
(`rows[t]` rows) or on its right (`columns[t]` rows). The factors of all matrices are
one vector, row by row, in the order of the matrices.

A sum of n products is that of its chunks: 64 consecutive products at a time are added
in their order, beginning with 0, and then the chunks in theirs, beginning with 0.
Products and sums are rounded to their type, so that the bits do not depend on the
processor; `tf.matmul` promises no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.vectors import add

CHUNK = 64


def multiply_matrices(
    x: Vector,
    right: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> tf.Tensor:
    r"""Returns \( M Q \) of each matrix M: the factors on the left.

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
        _product(part, factor)
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
    r"""Returns \( M^\top P \) of each matrix M: the factors on the right.

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
        part if factor is None else _product(tf.transpose(part), factor)
        for part, factor in zip(parts, factors, strict=True)
    ]
    return _joined(products)


def multiply_factors(
    left: tf.Tensor,
    values: tf.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> tf.Tensor:
    r"""Returns \( P Q^\top \) of each matrix, and the other elements.

    An element is the sum of `rank` products in their order.

    Args:
        left: P of each matrix, as for `multiply_transposed`.
        values: Q of each matrix and the other elements, as `multiply_transposed`
            returns them.
        rows: Rows of each tensor.
        columns: Columns of each matrix; 0 for other tensors.
        rank: Columns of each factor, positive.

    Returns:
        float32, the elements of all tensors.
    """
    factors = _factors(left, _rows_of_matrices(rows, columns), rank)
    sizes = [m * rank if m else n for n, m in zip(rows, columns, strict=True)]
    parts = tf.split(tf.convert_to_tensor(values), sizes)
    return _joined(
        [
            part if factor is None else _outer(factor, tf.reshape(part, [-1, rank]))
            for part, factor in zip(parts, factors, strict=True)
        ]
    )


def orthonormalize(x: tf.Tensor, rows: Sequence[int], rank: int) -> tf.Tensor:
    r"""Returns orthonormal columns that span those of each factor.

    Modified Gram-Schmidt in float64, column by column: v loses its part along each
    earlier column b, \( v \leftarrow v - (b^\top v) b \), and becomes
    \( v / \|v\| \). If at most \( 10^{-10} \) of its length is left, it depends on the
    earlier columns, and what is left is an error of rounding: such a column becomes
    zero.

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


def _product(matrix, factor):
    """Returns the product `[n, rank]` of a matrix `[n, m]` and a factor `[m, rank]`."""
    fill = -matrix.shape[1] % CHUNK
    matrix = tf.pad(matrix, [[0, 0], [0, fill]])
    factor = tf.pad(factor, [[0, fill], [0, 0]])
    # By place in the chunk, so that a loop takes the places one after the other.
    matrix = tf.transpose(tf.reshape(matrix, [matrix.shape[0], -1, CHUNK]), [2, 0, 1])
    factor = tf.transpose(tf.reshape(factor, [-1, CHUNK, factor.shape[1]]), [1, 0, 2])
    matrix = matrix[..., tf.newaxis]

    def product(place):
        return matrix[place] * factor[place][tf.newaxis]

    shape = [matrix.shape[1], matrix.shape[2], factor.shape[2]]
    chunks = _sum_in_order(product, CHUNK, shape, matrix.dtype)
    return _sum_in_order(
        lambda chunk: chunks[:, chunk], shape[1], [shape[0], shape[2]], matrix.dtype
    )


def _dot(a, b):
    """Returns the sum of the products of two vectors, a scalar."""
    return _product(a[tf.newaxis], b[:, tf.newaxis])[0, 0]


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
