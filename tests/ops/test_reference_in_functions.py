"""Tests of the pure-TensorFlow operations inside functions and XLA."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops import cases
from tests.ops.cases import same
from tests.ops.implementations import reference as ops
from tfgradcomp.core.word_format import NOTHING
from tfgradcomp.ops.reference.chunks import ChunkFormat


def dense(x, m, words, signs, scale, scales, codes, stream, flag, ratio, splits):
    """Calls operations of static shapes; returns a flat list of results."""
    size = splits[-1]
    values, places = words & 0x70000000, 7 * tf.range(words.shape[1])
    levels = scales[:, :, tf.newaxis] * [-1.0, 0.1, 1.0]
    matrices = [17, 3, 2], [33, 0, 18], 2
    chunk_words = words[:, : len(splits[1:]) * ChunkFormat(5, 512, 2).words]
    return [
        ops.pack_codes(codes, 5),
        ops.unpack_codes(words, 3, size),
        ops.pack_signs(x, stream),
        *ops.pack_momentum_signs(x, m, 0.9, flag, stream),
        ops.pack_ternary(x, scale, scale, splits, stream),
        *ops.block_statistics(x, splits),
        *ops.find_levels(x, splits, "optimal", 9, 1),
        *ops.find_levels(x, splits, "quantiles", 9),
        *ops.find_levels(x, splits, "symmetric", 2),
        *ops.find_levels(x, splits, "means", 3),
        ops.sum_codes(words, 3, size),
        # Sums to which a caller adds more.
        ops.sum_levels(words, scale, splits, 3, 2, 6) + x,
        x + ops.mean_of_signs(signs, scales, splits),
        ops.mean_of_signs(signs, scales, splits),
        ops.pack_levels(x, levels[0], splits, stream),
        ops.mean_of_levels(words, levels, splits),
        ops.mean_of_sparse(values | places, scales, splits),
        *ops.pack_largest(x, splits, 5, 512, 3),
        ops.mean_of_largest(chunk_words, levels[:, :, :2], splits, 5, 512, 2),
        ops.majority_vote(words, size, 3, 3, 1, stream),
        *ops.sign_error_feedback(x, m, m, 0.9, ratio, flag, splits),
        *ops.mean_sign_error_feedback(signs, scales, m, ratio, flag, splits),
        *ops.mean_sign_sums(signs, scales, m, ratio, splits),
        ops.mean_sign_residual(signs, scales, m, ratio, flag, signs[0], scale, splits),
        ops.multiply_matrices(x, m[:102], *matrices),
        ops.multiply_transposed(x, m[:38], *matrices),
        ops.multiply_factors(m[:38], x[:105], *matrices) + x,
        ops.orthonormalize(m[:38], [17, 2], 2),
    ]


def sparse(x, m, splits):
    """Calls the operations whose shapes depend on values, and are others in XLA."""
    total, v = x + m, abs(x * m)
    packed = ops.pack_unambiguous(total, v, m, m * m, 1.5, 0.999, splits)
    limits = cases.thresholds(splits, 0.5)
    more = ops.pack_over_threshold(total, v, m, m * m, limits, 1.5, 0.999, splits)
    return [*packed, *more, m + packed[2], 0.5 * more[2]]


@pytest.fixture(scope="module")
def traced():
    """A graph of the operations that is the same in XLA, traced once; its arguments,
    the ends of blocks, and what all operations give without a graph.
    """
    # Three workers: TensorFlow rewrites the operations of a graph. x / 3 becomes
    # x * (1 / 3), a sum of sums becomes one sum.
    size, workers = 600, 3
    splits = [0, 1, 33, 512, size]
    blocks = len(splits) - 1
    arguments = [
        tf.constant(value)
        for value in (
            cases.floats(size, "zeros"),
            cases.floats(size, seed=1),
            cases.words(3, workers, size),
            cases.words(2, workers, size),
            cases.positive(blocks),
            cases.positive([workers, blocks]),
            cases.codes(5, size),
            np.array([7, 3, 2**32 - 100]),
            True,
            np.float32(0.75),
        )
    ]
    graph = tf.function(dense, autograph=False).get_concrete_function(
        *arguments, splits
    )
    expected = [*dense(*arguments, splits), *sparse(*arguments[:2], splits)]
    return graph, arguments, splits, expected


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_the_same_bits_inside_functions(traced, jit_compile):
    graph, arguments, splits, expected = traced

    @tf.function(jit_compile=jit_compile, autograph=False)
    def everything(x, m, *others):
        return [*graph(x, m, *others), *sparse(x, m, splits)]

    results = everything(*arguments)
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        if jit_compile and b.dtype.is_floating:
            # XLA may contract a multiplication and an addition.
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        elif a.shape != b.shape:
            # Inside XLA there is a word for each element; most stand for no element.
            assert jit_compile and a.shape == arguments[0].shape, i
            same(a[a != NOTHING], b, i)
        else:
            same(a, b, i)
