"""Tests of signs in pure TensorFlow against NumPy, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import KINDS, STREAMS, layouts, same, tensor
from tests.ops.implementations import reference as ops

SIZES = (0, 1, 2, 20, 33, 65, 513, 1000, 6007)


@pytest.mark.parametrize("kind", ["normal", "zeros", "special"])
@pytest.mark.parametrize("size", SIZES)
def test_signs(kind, size):
    x = cases.floats(size, kind)
    same(ops.pack_signs(tf.constant(x)), oracle.pack_signs(x))
    for stream in STREAMS:
        words = ops.pack_signs(tf.constant(x), tensor(stream))
        same(words, oracle.pack_signs(x, stream))


def test_the_sign_of_every_special_number():
    # 0, -0, NaN, -NaN, Inf, -Inf, four denormals, six finite ones, 1, -1, 1/2, -3.
    codes = ops.unpack_codes(ops.pack_signs(tf.constant(cases.SPECIAL)), 2, 20)
    np.testing.assert_array_equal(
        codes, [1, 1] + 2 * [1, 0] + [1, 0, 1, 0] + 5 * [1, 0]
    )


@pytest.mark.parametrize("hot", [0, 1, 31, 32, 63, 64, 512, 999])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_sign_among_its_opposites(hot, sign):
    x = np.full(1000, -sign, np.float32)
    x[hot] = sign
    words = ops.pack_signs(tf.constant(x)).numpy().view(np.uint32)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:1000]
    np.testing.assert_array_equal(np.flatnonzero(bits == (sign > 0)), [hot])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warming_up", [False, True])
def test_signs_of_a_moving_average(kind, warming_up):
    for size in SIZES:
        x, m = cases.floats(size, kind), cases.floats(size, "zeros", seed=1)
        words, m_new, nonfinite = ops.pack_momentum_signs(
            tf.constant(x),
            tf.constant(m),
            0.9,
            tf.constant(warming_up),
            tensor((7, 3, 0)),
        )
        expected = oracle.pack_momentum_signs(x, m, 0.9, warming_up, (7, 3, 0))
        same(words, expected[0])
        same(m_new, expected[1])


@pytest.mark.sample(27)
@pytest.mark.parametrize("workers", cases.WORKERS)
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 33, 1000))
def test_means_of_signs(workers, size, layout):
    splits = cases.row_splits(size, layout)
    words = cases.words(2, workers, size)
    scale = cases.positive([workers, len(splits) - 1])
    # A sum that shows the order in which workers are added.
    scale[::2] *= np.float32(1e6)
    if scale.size:
        scale[0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        expected = oracle.mean_of_signs(words, scale, splits)
    same(ops.mean_of_signs(tf.constant(words), tf.constant(scale), splits), expected)
