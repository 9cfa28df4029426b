"""Residuals, momenta and shared scales that overflow are flagged."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tfgradcomp.compressors import (
    ORQ,
    BinGrad,
    Clip,
    ErrorFeedback,
    LinearQuantization,
    NesterovMomentum,
    ScaledSign,
    Ternary,
)
from tfgradcomp.core import Layout
from tfgradcomp.testing.inputs import LAYOUTS, compress, gradient_of


def all_finite(x, payload):
    floats = [v for v in payload.values() if v.dtype != "int32"]
    return all(np.isfinite(np.float64(numbers)).all() for numbers in [x, *floats])


@pytest.mark.parametrize("name", ["residual", "momentum"])
@pytest.mark.parametrize("number", [3.4e38, np.inf, np.nan])
def test_is_finite_is_false_where_the_state_overflows(name, number):
    compressor = NesterovMomentum(ErrorFeedback(ScaledSign()), 0.9)
    layout = LAYOUTS["tensors"]
    x = np.full(layout.size, 3e38, np.float32)
    state = compressor.init(layout)
    bad = tf.tensor_scatter_nd_update(tf.zeros([layout.size]), [[7]], [number])
    if name == "momentum":
        state = {**state, "momentum": bad}
    else:
        state = {**state, "inner": {**state["inner"], "residual": bad}}
    context = make_context(1, 5, 1, previous_rate=0.1)
    for alone in (compressor, compressor.fused()):
        # With the momentum alone, 0.9 * 3e38 + 3e38 overflows.
        for gradient, fits in ((x, False), (x / 3, number == np.float32(3.4e38))):
            x = tf.constant(gradient)
            compressed = alone.compress(x, state, layout, context)
            is_finite = compressed.is_all_finite(x)
            assert is_finite == all_finite(gradient, compressed.payload)
            if not fits:
                assert not is_finite


def test_a_scale_that_another_worker_made_infinite_is_not_finite():
    layout = LAYOUTS["tensors"]
    x, context = tf.constant(gradient_of(layout)), make_context()
    for compressor in (Ternary(), Clip(Ternary()).fused()):
        compressed = compress(
            compressor, x, (), layout, context, lambda name, scale: scale + np.inf
        )
        assert not compressed.is_all_finite(x)


@pytest.mark.parametrize("compressor", [ORQ(3), LinearQuantization(2), BinGrad("pb")])
def test_levels_whose_distance_overflows_are_not_finite(compressor):
    x = tf.constant([-3e38, 2.9e38, 3e38] * 4)
    layout = Layout.from_sizes([12])
    compressed = compressor.compress(x, (), layout, make_context())
    assert not compressed.is_all_finite(x)
    x /= 4
    assert compressor.compress(x, (), layout, make_context()).is_all_finite(x)
