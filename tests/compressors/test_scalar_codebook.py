"""Scalar codebooks: the levels, their error, and three workers beside NumPy."""

import statistics

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits
from tfgradcomp.compressors import ScalarCodebook, ScaledSign
from tfgradcomp.core import Layout
from tfgradcomp.testing.inputs import LAYOUTS, decoded_step, first_step, gradient_of
from tfgradcomp.transports.messages import message_words

NORMAL = statistics.NormalDist()
# Max 1960, Table I: square errors of the best levels.
ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def lloyd(count):
    """The best levels, by Lloyd's iteration, and their square error."""
    pdf = np.vectorize(lambda v: NORMAL.pdf(v) if np.isfinite(v) else 0.0)
    cdf = np.vectorize(lambda v: NORMAL.cdf(v) if np.isfinite(v) else float(v > 0))
    levels = np.array([NORMAL.inv_cdf((k + 0.5) / count) for k in range(count)])
    for _ in range(1500):
        edges = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]
        mass = np.diff(cdf(edges))
        levels = -np.diff(pdf(edges)) / mass
    return levels, 1 - np.sum(mass * levels**2)


@pytest.mark.parametrize("number", ERRORS)
def test_levels_are_those_of_lloyds_iteration(number):
    levels, error = lloyd(2**number)
    np.testing.assert_allclose(ScalarCodebook(number).levels, levels, atol=1e-9)
    assert abs(error - ERRORS[number]) < 6e-5


@pytest.mark.parametrize("number", ERRORS)
def test_error_of_normal_elements_is_that_of_the_closed_form(number):
    layout = Layout.from_sizes([2**20], 2048)
    x = np.random.default_rng(number).normal(size=layout.size).astype(np.float32)
    lost = np.sum((decoded_step(ScalarCodebook(number), x, layout) - x) ** 2)
    assert abs(lost / np.sum(x**2) / ERRORS[number] - 1) < 0.02


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_elements_become_the_nearest_levels(number, name):
    layout = LAYOUTS[name]
    x = gradient_of(layout)
    expected = reference.scalar_codebook(x, layout.row_splits, number)
    found = decoded_step(ScalarCodebook(number), x, layout)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_one_bit_is_the_scaled_sign():
    layout = LAYOUTS["tensors"]
    x = gradient_of(layout)
    x[:3] = 0.0, -0.0, 1e-30
    signs = first_step(ScaledSign(), x, layout).payload
    found = first_step(ScalarCodebook(1), x, layout).payload
    assert {name: bits(v) for name, v in found.items()} == {
        name: bits(v) for name, v in signs.items()
    }


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("width", [1, 2, 2000])
def test_a_single_large_element_contracts(number, width):
    x = np.zeros(width, np.float32)
    x[width // 2] = -3.0
    left = decoded_step(ScalarCodebook(number), x, Layout.from_sizes([width])) - x
    kept = reference.kept_by_codebook(number) * 9 / width
    assert np.sum(left**2) <= 9 * (1 + 1e-6) - kept


@pytest.mark.parametrize(("number", "each"), [(1, 32), (2, 16), (3, 10), (4, 8)])
def test_a_word_holds_codes_without_gaps(number, each):
    fields = ScalarCodebook(number).fields(Layout.from_sizes([4800], 480))
    assert message_words(fields) == 4800 // each + 10


def test_a_level_that_overflows_is_told():
    layout = Layout.from_sizes([10])
    for size, is_finite in ((9e37, True), (3e38, False), (np.nan, False)):
        x = tf.fill([10], np.float32(size))
        assert first_step(ScalarCodebook(4), x, layout).is_finite == is_finite
    zeros = decoded_step(ScalarCodebook(2), tf.fill([10], 1e-38), layout)
    np.testing.assert_array_equal(zeros, np.zeros(10))


@pytest.mark.parametrize("number", [0, 5, 2.0, True])
def test_other_numbers_of_bits_raise(number):
    with pytest.raises(ValueError, match="bits must be .*Received: bits="):
        ScalarCodebook(number)
