"""Which tensor of a vector is the first with NaN or infinity."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.implementations import native, needs_library, reference
from tfgradcomp.ops import SplitVector

pytestmark = needs_library

SIZES = [5, 0, 32, 100, 1, 2**18, 33]
KINDS = {"native": native, "reference": reference}


def vector(bad=(), scale=1.0):
    """Parts of several shapes, with a value in the middle of some of them."""
    parts = [np.ones(size, np.float32) for size in SIZES]
    for index, value in bad:
        parts[index][SIZES[index] // 2] = value
    parts[3] = parts[3].reshape(4, 25)
    return SplitVector(map(tf.constant, parts), scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    "bad, expected",
    [
        ([], 7),
        ([(0, np.nan)], 0),
        ([(6, -np.inf)], 6),
        # Threads find them in any order.
        ([(6, np.inf), (5, np.nan), (4, np.nan)], 4),
        ([(5, np.nan), (3, np.inf), (6, np.nan)], 3),
        ([(2, 3.4e38), (3, -3.4e38), (4, 1e-45)], 7),
    ],
)
def test_it_is_the_first_part_that_has_one(kind, in_graph, bad, expected):
    find = KINDS[kind].first_nonfinite
    given = vector(bad)

    def found(is_finite):
        return find(given, is_finite)

    find_it = tf.function(found) if in_graph else found
    assert int(find_it(tf.constant(False))) == expected
    assert int(find_it(tf.constant(True))) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_with_the_scale_may_overflow(kind):
    find = KINDS[kind].first_nonfinite
    large = [(2, 3e38)]
    assert int(find(vector(large), tf.constant(False))) == 7
    assert int(find(vector(large, 2.0), tf.constant(False))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_a_vector_of_one_part(kind):
    find = KINDS[kind].first_nonfinite
    assert int(find(tf.constant([1.0, np.inf]), tf.constant(False))) == 0
    assert int(find(tf.zeros([2, 3]), tf.constant(False))) == 1
