"""Tests of the arguments of every native operation, right, wrong, empty or left out."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tests.ops.arguments import BAD, CALLS, STREAM, WORDS, X
from tests.ops.implementations import native, reference
from tfgradcomp import ops
from tfgradcomp.ops.registry import OPERATIONS


def on_cpu(name, arguments):
    with tf.device("CPU:0"):
        return getattr(native, name)(**arguments)


def test_every_operation_is_in_the_tables():
    assert CALLS.keys() == BAD.keys() == OPERATIONS.keys()


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_the_reference_s_and_shapes_are_static(name):
    expected = tf.nest.flatten(getattr(reference, name)(**CALLS[name]))
    traced = tf.function(lambda: getattr(native, name)(**CALLS[name]))
    static = tf.nest.flatten(traced.get_concrete_function().structured_outputs)
    for got in (tf.nest.flatten(on_cpu(name, CALLS[name])), static):
        shapes = [t.shape.as_list() for t in expected]
        if got is static and name in ("pack_unambiguous", "pack_over_threshold"):
            shapes[0] = [None]  # As many words as there are.
        assert [t.shape.as_list() for t in got] == shapes
        assert [t.dtype for t in got] == [t.dtype for t in expected]
    for a, b in zip(tf.nest.flatten(traced()), expected, strict=True):
        assert bits(a) == bits(b)


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name in BAD for argument in BAD[name]]
)
def test_a_wrong_argument_is_an_error_never_a_crash(name, argument):
    for value in BAD[name][argument]:
        arguments = {**CALLS[name], argument: value}
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            on_cpu(name, arguments)
        assert "Received" in str(caught.value), value


@pytest.mark.parametrize("name", OPERATIONS)
def test_vectors_may_be_empty(name):
    empty = dict(row_splits=[0])
    if name != "find_levels":  # There it is the number of levels.
        empty["count"] = 0
    nothing = np.zeros(0, np.float32)
    empty["rows"], empty["columns"], empty["threshold"] = [], [], nothing
    vectors = "left", "right", "query", "y"
    vectors += "x", "moments", "momentum", "residual", "variance", "limit", "codes"
    for argument in vectors:
        dtype = np.asarray(CALLS[name].get(argument, nothing)).dtype
        empty[argument] = nothing.astype(dtype)
    words = np.asarray(CALLS[name].get("words", WORDS))
    empty["words"], empty["sent_words"] = words[..., :0], WORDS[:, :0]
    indices = np.asarray(CALLS[name].get("indices", WORDS))
    empty["indices"], empty["values"] = indices[..., :0], np.zeros((2, 0), np.float32)
    scale = np.ndim(CALLS[name].get("scale", nothing))
    empty["scale"] = np.zeros((2, 0), np.float32) if scale == 2 else nothing
    empty["sent_scale"] = np.zeros((2, 0), np.float32)
    levels = np.shape(CALLS[name].get("levels", WORDS))
    empty["levels"] = np.zeros([*levels[:-2], 0, levels[-1]], np.float32)
    arguments = {k: empty.get(k, v) for k, v in CALLS[name].items()}
    # A count of nothing is a number, too, and so is the number of empty parts.
    number = 1 if name == "first_nonfinite" else 0
    for result in tf.nest.flatten(on_cpu(name, arguments)):
        is_empty = result.shape.num_elements() == 0
        assert is_empty or (result.shape == [] and result == number)


@pytest.mark.parametrize(
    "name, argument",
    [(name, a) for name in CALLS for a in ("stream", "momentum", "sum_base", "both")],
)
def test_optional_arguments_may_be_left_out(name, argument):
    left_out = dict.fromkeys([argument])
    if argument == "both":  # There is none without the other.
        left_out = dict.fromkeys(["moments", "variance"])
    if not left_out.keys() <= CALLS[name].keys() or (name, argument) in [
        ("pack_momentum_signs", "momentum"),
        ("pack_ternary", "stream"),
        ("round_to_bfloat16", "stream"),
        ("pack_unambiguous", "both"),
    ]:
        return
    arguments = {**CALLS[name], **left_out}
    got = tf.nest.flatten(on_cpu(name, arguments))
    expected = tf.nest.flatten(getattr(reference, name)(**arguments))
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or bits(a) == bits(b)


def test_shapes_that_are_not_known_yet_are_checked_when_they_are():
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def statistics(x, y):
        words = native.pack_momentum_signs(x, y, 0.9, False, STREAM)[0]
        assert words.shape.as_list() == [None]
        return native.unpack_codes(words, 2, 5)

    with tf.device("CPU:0"):
        assert statistics(X, X).shape == [5]
        with pytest.raises(tf.errors.InvalidArgumentError, match="momentum must have"):
            statistics(X, X[:4])


def test_there_is_no_gradient():
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, momentum, _ = native.pack_momentum_signs(x, x, 0.9, False, STREAM)
    assert tape.gradient(momentum, x) is None


@pytest.mark.parametrize("inter_op_threads, kept", [(-1, True), (1, False)])
def test_threads_take_denormals_as_the_thread_of_the_op(inter_op_threads, kept):
    # TensorFlow's threads flush them; -1 runs the op in this thread, which does not.
    # It shares 4 MB out to four threads that do.
    count = 1_000_000
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads, intra_op_parallelism_threads=4
    )
    with tf.Graph().as_default(), tf.device("CPU:0"):
        words = tf.zeros([1, ops.words_for(count, 2)], tf.int32)
        scale = tf.compat.v1.placeholder(tf.float32, [1])
        values = native.sum_levels(words, scale, [0, count], base=2, step=1, zero=1)
        with tf.compat.v1.Session(config=config) as session:
            denormal = np.array([1e-40], np.float32)
            got = session.run(values, {scale: denormal})
    assert bits(got) == bits(np.full(count, -denormal if kept else -0.0, np.float32))
