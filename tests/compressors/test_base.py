"""The contract of a compressor, and the one that sends a vector as it is."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tfgradcomp import compressors
from tfgradcomp.compressors import (
    Clip,
    Compressed,
    Identity,
    MeanErrorFeedback,
    NesterovMomentum,
)
from tfgradcomp.core import Layout, SplitVector

LAYOUT = Layout.from_sizes([3, 2])
NAMES = "bingrad identity linear orq qsgd scaled_sign ternary top_k".split()


def test_float32_values_are_sent_as_they_are():
    x = np.array([1.5, -0.0, np.float32(1e-40), 3e38, -2.0], np.float32)
    payload, state, is_finite = Identity().compress(x, (), LAYOUT, make_context())
    assert payload["values"].numpy().tobytes() == x.tobytes()
    assert state == () and is_finite


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_to_nearest(dtype):
    x = np.random.default_rng(0).normal(size=5).astype(np.float32)
    payload, _, _ = Identity(dtype).compress(x, (), LAYOUT, make_context())
    expected = x.astype(tf.as_dtype(dtype).as_numpy_dtype)
    np.testing.assert_array_equal(payload["values"], expected)
    np.testing.assert_array_equal(
        Identity(dtype).decompress(payload, LAYOUT), expected.astype(np.float32)
    )


def test_an_unknown_dtype_raises():
    with pytest.raises(ValueError, match="dtype must be one of.*'int8'"):
        Identity("int8")


@pytest.mark.parametrize("bad", ["input", "payload", None])
def test_is_all_finite_looks_itself_where_the_compressor_has_not(bad):
    x, values = [1.0, 2.0], [1.0, 2.0]
    if bad:
        (x if bad == "input" else values)[1] = np.nan
    compressed = Compressed({"values": tf.constant(values)}, ())
    assert compressed.is_all_finite(tf.constant(x)) == (bad is None)
    split = SplitVector(tf.split(tf.constant(x), 2))
    assert compressed.is_all_finite(split) == (bad is None)


HEARING = MeanErrorFeedback(Identity("bfloat16"))


@pytest.mark.parametrize(
    "around", [Clip(HEARING, 1.0), NesterovMomentum(HEARING, 0.5)], ids=str
)
def test_a_wrapper_passes_the_reply_on(around):
    x, context = tf.constant([1.0, -2.0, 9.0, 0.5, 4.0]), make_context()
    before = around.init(LAYOUT)
    state = around.compress(x, before, LAYOUT, context).state
    update = tf.constant([3.0, 0.0, -1.0, 2.0, 0.25])
    state = around.received(state, update, LAYOUT, context)
    sent = around.transform(x, before, LAYOUT, context)
    residual = (state["inner"] or state)["residual"]
    np.testing.assert_array_equal(residual, sent - update)


@pytest.mark.parametrize("name", NAMES)
def test_a_compressor_is_found_by_its_short_name(name):
    compressor = compressors.get(name)
    assert compressor == type(compressor)()
    assert type(compressor).short_name == name
    assert compressors.get(compressor) is compressor


def test_an_unknown_name_raises_with_the_choices():
    choices = r"\['bingrad', .*'top_k'\].*compressor='zip'"
    with pytest.raises(ValueError, match=choices):
        compressors.get("zip")
    public = (getattr(compressors, name) for name in compressors.__all__)
    named = {getattr(kind, "short_name", None) for kind in public}
    assert named >= {*NAMES}


def test_a_class_that_leaves_something_out_cannot_be_constructed():
    assert inspect.isabstract(compressors.Compressor)
    with pytest.raises(TypeError, match="abstract"):
        compressors.Codebook()
