"""Factors of low rank, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tfgradcomp import ops
from tfgradcomp.compressors.low_rank import LowRank, Matrices
from tfgradcomp.core import Layout
from tfgradcomp.testing.inputs import first_step, gradient_of, make_context

SHAPES = [(20, 10), (10,), (3, 3, 4, 8), (), (130, 70)]
LAYOUT = Layout.from_shapes(SHAPES)
RANK = 2


def drawn_by(matrices, context):
    return matrices.drawn(matrices.columns, RANK, context)


def test_matrices_are_kernels_that_their_factors_halve():
    matrices = Matrices.of(LAYOUT, RANK)
    assert matrices.rows == (20, 10, 36, 1, 130)
    assert matrices.columns == (10, 0, 8, 0, 70)
    # The rank must be below both sides, and r (n + m) below n m / 2.
    layout = Layout.from_shapes([(3, 100), (2, 100), (12, 12), (16, 16), (8, 24)])
    assert Matrices.of(layout, 2).columns == (0, 0, 12, 16, 24)
    assert Matrices.of(layout, 3).columns == (0, 0, 0, 16, 0)


def test_parts_of_tensors_are_vectors():
    assert Matrices.of(Layout.from_sizes([200, 10]), 2).columns == (0, 0)
    assert Matrices.of(Layout((0, 200)), 2).columns == (0,)


def test_factors_of_a_matrix_of_the_same_rank_are_exact():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(40, RANK)) @ rng.normal(size=(RANK, 30))
    layout = Layout.from_shapes([matrix.shape])
    x = tf.constant(matrix.reshape(-1), tf.float32)
    payload = first_step(LowRank(RANK), x, layout).payload
    assert sum(v.shape[0] for k, v in payload.items() if k == "values") == RANK * 30
    np.testing.assert_allclose(
        LowRank(RANK).decompress(payload, layout), x, atol=1e-5, rtol=0
    )


def test_bases_are_orthonormal_whatever_the_products():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(40, 1))
    factors = [
        ((1, 1, 1), rng.normal(size=(50, 3))),
        ((1, 0, 1), rng.normal(size=(20, 3)) * [1, 0, 1]),
        ((1, 0, 0), np.repeat(one, 3, axis=1)),
        # Rounding to float32 makes these columns independent.
        ((1, 1, 1), 1e-30 * one * [1, 1 / 3, 1 / 7]),
        ((0, 0, 0), np.zeros((10, 3))),
    ]
    rows = [len(factor) for _, factor in factors]
    flat = np.concatenate([factor for _, factor in factors]).reshape(-1)
    flat = flat.astype(np.float32)
    bases = np.reshape(ops.orthonormalize(flat, rows, 3), [-1, 3]).astype(np.float64)
    bases = np.split(bases, np.cumsum(rows)[:-1])
    for (lengths, _), basis in zip(factors, bases, strict=True):
        np.testing.assert_allclose(basis.T @ basis, np.diag(lengths), atol=1e-6)


def test_columns_of_zeros_are_drawn_and_others_stay():
    matrices = Matrices.of(LAYOUT, RANK)
    right = np.random.default_rng(0).normal(size=(88, RANK)).astype(np.float32)
    right[:10, 1] = 0
    right[18:] = 0
    # A zero by itself is no column of zeros.
    right[5, 0] = 0
    context = make_context(step=3, seed=5)
    filled = matrices.filled(
        tf.constant(right.reshape(-1)), matrices.columns, RANK, context
    )
    filled = np.reshape(filled, [-1, RANK])
    drawn = np.reshape(drawn_by(matrices, context), [-1, RANK])
    expected = np.where(right == 0, drawn, right)
    expected[5, 0] = 0
    np.testing.assert_array_equal(filled, expected)
    assert abs(drawn.mean()) < 0.3 and 0.7 < drawn.std() < 1.3
    # All workers draw the same, and other numbers in another step.
    assert bits(drawn_by(matrices, make_context(3, 5, 1, 2))) == bits(drawn)
    assert bits(drawn_by(matrices, make_context(4, 5))) != bits(drawn)


def test_what_a_matrix_draws_does_not_depend_on_where_vectors_are_cut():
    whole = drawn_by(Matrices.of(LAYOUT, RANK), make_context(3, 5))
    begin = LAYOUT.row_splits[2] // 128 * 128
    padding = LAYOUT.row_splits[2] - begin
    rest = Matrices.of(Layout.from_shapes([(padding,), *SHAPES[2:]]), RANK)
    context = make_context(3, 5)._replace(offset=begin)
    assert bits(drawn_by(rest, context)) == bits(whole[10 * RANK :])


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_products_are_those_of_numpy(rank):
    matrices = Matrices.of(LAYOUT, rank)
    x = gradient_of(LAYOUT)
    rng = np.random.default_rng(rank)
    right = rng.normal(size=rank * sum(matrices.widths)).astype(np.float32)
    left = rng.normal(size=rank * sum(matrices.heights)).astype(np.float32)
    products = ops.multiply_matrices(tf.constant(x), right, *matrices, rank)
    values = ops.multiply_transposed(tf.constant(x), left, *matrices, rank)
    update = ops.multiply_factors(left, values, *matrices, rank)
    tensors = np.split(x.astype(np.float64), LAYOUT.row_splits[1:-1])
    rights = iter(np.split(right, rank * np.cumsum(matrices.widths)[:-1]))
    lefts = iter(np.split(left, rank * np.cumsum(matrices.heights)[:-1]))
    wanted = [], [], []
    for tensor, n, m in zip(tensors, *matrices, strict=True):
        if not m:
            wanted[1].append(tensor)
            wanted[2].append(tensor)
            continue
        matrix, p = tensor.reshape(n, m), next(lefts).reshape(n, rank)
        wanted[0].append(matrix @ next(rights).reshape(m, rank))
        wanted[1].append(matrix.T @ p)
        wanted[2].append(p @ wanted[1][-1].T)
    for came, parts in zip((products, values, update), wanted, strict=True):
        expected = np.concatenate([part.reshape(-1) for part in parts])
        scale = np.abs(expected).max()
        np.testing.assert_allclose(came, expected, atol=2e-6 * scale, rtol=0)
