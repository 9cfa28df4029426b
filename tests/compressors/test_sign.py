"""The scaled sign: what becomes of zeros, and the scale of a block."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tfgradcomp.compressors import ScaledSign
from tfgradcomp.core import Layout

pytestmark = pytest.mark.python_ops


def decoded(x, layout=None):
    layout = layout or Layout.from_sizes([len(x)])
    payload = ScaledSign().compress(tf.constant(x), (), layout, make_context()).payload
    return ScaledSign().decompress(payload, layout).numpy()


def test_the_scale_is_the_mean_magnitude_not_the_root_mean_square():
    x = np.array([3.0, -1.0, 0.0, 0.0, 2.0, -2.0, 8.0], np.float32)
    layout = Layout.from_sizes([4, 2, 1])
    vector = decoded(x, layout)
    np.testing.assert_array_equal(vector, [1, -1, 1, 1, 2, -2, 8])


def test_the_scale_of_the_largest_floats_does_not_overflow():
    x = np.resize(np.array([3e38, -3e38], np.float32), 1000)
    np.testing.assert_allclose(decoded(x), x, rtol=1e-6)


def test_both_zeros_are_plus_on_the_wire_of_the_scaled_sign():
    x = np.array([0.0, -0.0, -2.0, 4.0], np.float32)
    np.testing.assert_array_equal(decoded(x), [1.5, 1.5, -1.5, 1.5])
