"""What a server needs that holds a part of the vector, against NumPy on the whole."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tfgradcomp.ops import native, reference

SIZE = 3000


@pytest.fixture(params=["native", "python"])
def ops(request):
    if request.param == "python":
        return reference
    if shutil.which("g++") is None and native.find_library() is None:
        pytest.skip("There is no library of native ops and no g++ to build one.")
    return native


def codes(words, base, count):
    return np.array(oracle.unpack(np.asarray(words), base, count))


# -- Random words -------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 4, 60, 512, 1996, SIZE - 4])
@pytest.mark.parametrize("first", [0, 2**32 - 300])
def test_a_part_draws_what_the_whole_vector_draws_there(ops, offset, first):
    whole = (7, 3, first)
    part = tf.constant([7, 3, first + offset // 4], tf.int64)
    x = cases.floats(SIZE, "zeros")
    rest, left = tf.constant(x[offset:]), SIZE - offset
    drawn = reference.random_bits(part, left)
    np.testing.assert_array_equal(drawn, oracle.stream_bits(SIZE, *whole)[offset:])

    expected = oracle.sign_codes(x, whole)[offset:]
    got = codes(ops.pack_signs(rest, part), 2, left)
    np.testing.assert_array_equal(got, expected)
    words, _ = ops.pack_momentum_signs(rest, rest, 0.9, True, part)
    np.testing.assert_array_equal(codes(words, 2, left), expected)

    limit, scale = np.float32([np.inf]), np.float32([3])
    expected = oracle.pack_ternary(x, limit, scale, [0, SIZE], whole)
    got = ops.pack_ternary(rest, limit, scale, [0, left], part)
    np.testing.assert_array_equal(
        codes(got, 3, left), codes(expected, 3, SIZE)[offset:]
    )

    for base in (2, 3):
        ballots = np.random.default_rng(base).integers(0, base, [4, SIZE])
        sent = np.stack([oracle.pack(row, base) for row in ballots])
        expected = oracle.majority_vote(sent, SIZE, base, 2, 0, whole)
        sent = np.stack([oracle.pack(row[offset:], base) for row in ballots])
        got = ops.majority_vote(tf.constant(sent), left, base, 2, 0, part)
        np.testing.assert_array_equal(
            codes(got, 2, left), codes(expected, 2, SIZE)[offset:]
        )
