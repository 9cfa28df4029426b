"""INT8 and INT4: their bits, and the integers that are sent."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp import methods
from tfgradcomp.core import Layout
from tfgradcomp.transports.messages import message_words

BOTH = pytest.mark.parametrize(
    ("method", "bits", "most"), [(methods.int8, 8, 127), (methods.int4, 4, 7)]
)


@BOTH
def test_an_element_takes_exactly_its_bits(method, bits, most):
    layout = Layout.from_sizes([3 * 2048, 2048], method().block_size)
    words = message_words(method().compressor.fields(layout))
    assert 32 * words == bits * layout.size + 32 * 4


@BOTH
def test_integers_stand_beside_the_scaled_elements(method, bits, most):
    layout = Layout.from_sizes([100, 31], 64)
    x = np.random.default_rng(3).normal(size=layout.size).astype(np.float32)
    x[64:128] *= 1e-4
    compressor = method(block_size=64).compressor
    payload, _, _ = compressor.compress(tf.constant(x), (), layout, make_context())
    decoded = np.asarray(compressor.decompress(payload, layout), np.float64)
    for block in reference.blocks(layout.row_splits):
        scale = np.abs(x[block]).max().astype(np.float64) / most
        integers = decoded[block] / scale
        np.testing.assert_allclose(integers, np.round(integers), rtol=0, atol=1e-4)
        assert np.abs(integers).max() == pytest.approx(most)
        assert (np.abs(integers - x[block] / scale) < 1 + 1e-4).all()
