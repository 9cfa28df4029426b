"""Every compressor tells whether its input and its payload are finite."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.contracts import LAYOUTS, every_row, gradient_of
from tests.helpers import compress_in_rounds, make_context
from tests.methods import second_moments_of
from tfgradcomp.compressors import (
    Clip,
    ErrorFeedback,
    NesterovMomentum,
    ScaledSign,
    Ternary,
)
from tfgradcomp.core import SplitVector

# An element that is not finite, or so large that something after it overflows.
BAD = {
    "fine": 1.0,
    "large": 1e5,
    "largest": 3.4e38,
    "infinite": np.inf,
    "minus infinite": -np.inf,
    "nan": np.nan,
}


@every_row
@pytest.mark.parametrize("layout", ["one", "tensors", "buckets"])
def test_is_finite_covers_the_gradient_and_the_payload(row, layout):
    layout = LAYOUTS[layout]
    places = itertools.cycle([0, layout.size // 2, layout.size - 1])
    for number, place in zip(BAD.values(), places, strict=False):
        x = gradient_of(layout)
        x[place] = number
        given = tf.constant(x)
        if place:
            given = SplitVector(tf.split(given, layout.sizes))
        for compressor in {row.compressor, row.compressor.fused()}:
            state = compressor.init(layout)
            context = make_context(1, 5, 1, moments=second_moments_of(x))
            compressed = compressor.compress(given, state, layout, context)
            is_finite = compressed.is_all_finite(given)
            assert is_finite.shape == [] and is_finite.dtype == tf.bool
            assert is_finite == all_finite(x, compressed.payload)


def all_finite(x, payload):
    floats = [
        v.numpy().astype(np.float64) for v in payload.values() if v.dtype != "int32"
    ]
    return all(np.isfinite(numbers).all() for numbers in [x, *floats])


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
        compressed = compress_in_rounds(
            compressor, x, (), layout, context, lambda scale: scale + np.inf
        )
        assert not compressed.is_all_finite(x)


@every_row
def test_is_finite_is_known_inside_functions(row):
    layout = LAYOUTS["tensors"]
    compressor = row.compressor.fused()

    @tf.function
    def finite(tensors):
        x, state = SplitVector(tensors), compressor.init(layout)
        context = make_context(1, 5, 1, moments=second_moments_of(x))
        return compressor.compress(x, state, layout, context).is_all_finite(x)

    x = gradient_of(layout)
    assert finite(tf.split(x, layout.sizes))
    x[40] = np.nan
    assert not finite(tf.split(x, layout.sizes))
