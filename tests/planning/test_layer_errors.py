"""Errors of layers beside closed forms: random rounding, and the best low rank."""

import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp import methods
from tfgradcomp.planning.layer_errors import (
    squared_errors,
    squared_lengths,
    worst_layer,
)

SHAPES = [(64, 48), (700,), (40, 30)]
SIZES = [3072, 700, 1200]
random = np.random.default_rng(3)
OWN, MEAN = (random.normal(size=[2, 4972]) * [[3], [1]]).astype(np.float32)


def by_layers(vector):
    return [part.astype(np.float64) for part in np.split(vector, np.cumsum(SIZES)[:-1])]


def rounding_variance(vector, levels, block_size):
    """The expected squared error of each element, between evenly spaced levels."""
    variance = np.zeros(len(vector))
    for begin in range(0, len(vector), block_size):
        block = vector[begin : begin + block_size].astype(np.float64)
        step = 2 * np.abs(block).max() / (levels - 1)
        place = (block / step) % 1
        variance[begin : begin + block_size] = step**2 * place * (1 - place)
    return [part.sum() for part in by_layers(variance)]


def errors_of(method):
    own, mean = tf.constant(OWN), tf.constant(MEAN)
    return squared_errors(method, own, mean, SHAPES).numpy()


@pytest.mark.parametrize("reply", ["float32", "requantize"])
def test_errors_of_random_rounding_are_the_variance(reply):
    own, of_reply = errors_of(methods.qsgd(9, block_size=512, reply=reply))
    # A sum over hundreds of elements is near its expectation.
    np.testing.assert_allclose(own, rounding_variance(OWN, 9, 512), rtol=0.25)
    expected = np.zeros(3)
    if reply == "requantize":
        expected = rounding_variance(MEAN, 9, 512)
    np.testing.assert_allclose(of_reply, expected, rtol=0.25)


def test_errors_of_low_rank_are_near_those_of_the_best_factors():
    own, of_reply = errors_of(methods.power_sgd(4))
    matrix, vector, other = by_layers(MEAN)

    def beyond(values, shape):
        singular = np.linalg.svd(values.reshape(shape), compute_uv=False)
        return np.square(singular[4:]).sum()

    best = [beyond(matrix, SHAPES[0]), 0.0, beyond(other, SHAPES[2])]
    assert not own.any() and of_reply[1] == 0
    for found, least in zip(of_reply[[0, 2]], [best[0], best[2]], strict=True):
        assert least <= found * (1 + 1e-6) and found < 1.1 * least


def test_the_worst_layer_is_that_of_the_largest_ratio():
    lengths = squared_lengths(tf.constant(MEAN), SHAPES).numpy()
    expected = [np.square(part).sum() for part in by_layers(MEAN)]
    np.testing.assert_allclose(lengths, expected, rtol=1e-6)
    # 4 workers' errors of 8, 32 and 0 in all; then 1, 0 and 0 of the reply.
    found = worst_layer(
        np.array([8.0, 32.0, 0]), np.array([1.0, 0, 0]), np.array([6.0, 1, 0]), 4, "abc"
    )
    assert found == (pytest.approx(np.sqrt(2.0)), "b")
