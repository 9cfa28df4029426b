"""Tests of error feedback in pure TensorFlow against NumPy, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import KINDS, flushed, layouts, same
from tests.ops.implementations import reference as ops
from tests.pairwise import parametrize_pairwise


@pytest.mark.sample(36)
@parametrize_pairwise(
    shape=layouts(0, 1, 33, 1000, 6007),
    kind=KINDS,
    moving=[True, False],
    momentum=[True, False],
)
def test_sign_error_feedback(shape, kind, moving, momentum):
    size, layout = shape
    splits = cases.row_splits(size, layout)
    x, e = cases.floats(size, kind), cases.floats(size, kind, seed=1)
    m = cases.floats(size, kind, seed=2) if momentum else None
    if kind == "huge":
        # Away from infinity.
        x, e, m = x / 8, e / 8, None if m is None else m / 8
    if kind == "tiny":
        # Of one sign, so that no p is denormal, whose sign a processor may drop.
        e, m = np.copysign(e, x), None if m is None else np.copysign(m, x)
    ratio = np.float32(0.75)
    results = ops.sign_error_feedback(
        tf.constant(x),
        None if m is None else tf.constant(m),
        tf.constant(e),
        0.9,
        tf.constant(ratio),
        tf.constant(moving),
        splits,
    )
    expected = oracle.sign_error_feedback(x, m, e, 0.9, ratio, moving, splits)
    results, expected = [
        [*values[:3], flushed(np.asarray(values[3]))] for values in (results, expected)
    ]
    for name, a, b in zip(
        ("words", "scale", "momentum", "residual"), results, expected, strict=True
    ):
        if b is None:
            assert a is None
        else:
            same(a, b, name)


def test_a_zero_counts_as_plus_in_error_feedback():
    p = np.array([0.0, -0.0, 1.0, -3.0], np.float32)
    words, scale, _, left = ops.sign_error_feedback(
        tf.constant(p), None, tf.zeros(4), 0.0, 1.0, True, [0, 4]
    )
    np.testing.assert_array_equal(ops.unpack_codes(words, 2, 4), [1, 1, 1, 0])
    np.testing.assert_array_equal(scale, [1])
    np.testing.assert_array_equal(left, [-1, -1, 0, -2])


@pytest.mark.sample(28)
@parametrize_pairwise(
    shape=layouts(0, 1, 33, 1000), workers=[1, 3, 4], moving=[True, False]
)
def test_mean_sign_error_feedback(shape, workers, moving):
    size, layout = shape
    splits = cases.row_splits(size, layout)
    words = cases.words(2, workers, size)
    scale = cases.positive([workers, len(splits) - 1])
    e = cases.floats(size, seed=1)
    results = ops.mean_sign_error_feedback(
        words, scale, e, tf.constant(1.5), tf.constant(moving), splits
    )
    expected = oracle.mean_sign_error_feedback(words, scale, e, 1.5, moving, splits)
    for a, b in zip(results, expected, strict=True):
        same(a, b)
