"""Vectors in parts: the class, and operations that read or write them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tests.ops import cases
from tests.ops.implementations import (
    WHOLE,
    expected_calls,
    made,
    native,
    needs_library,
    on_tensors,
    reference,
)
from tfgradcomp.ops import SplitVector

SIZES = (0, 1, 31, 33, 65, 1000, 6007)
READERS = (
    "pack_signs_checked",
    "pack_momentum_signs",
    "pack_ternary",
    "block_statistics",
    "find_levels",
    "pack_levels",
    "sign_error_feedback",
    "pack_unambiguous",
    "pack_over_threshold",
    "pack_largest",
    "add_scaled",
    "multiply_matrices",
    "multiply_transposed",
)
WRITERS = ("sum_levels", "mean_of_signs", "mean_of_levels", "mean_of_sparse")
WRITERS += ("mean_of_largest", "multiply_factors")


# -- The class ----------------------------------------------------------------------


def parts_of(array, sizes):
    """Tensors of one axis and of two, by turns."""
    tensors = tf.split(tf.constant(array), sizes)
    return SplitVector(
        tf.reshape(t, [t.shape[0] // 2, 2]) if i % 3 == 0 and t.shape[0] % 2 == 0 else t
        for i, t in enumerate(tensors)
    )


def example():
    # Of equal shapes: what takes them for a list would stack them.
    array = np.arange(8, dtype=np.float32) - 3
    return array, SplitVector(tf.unstack(tf.reshape(array, [2, 2, 2])))


USES = {
    "x + t": lambda x, t: x + t,
    "t + x": lambda x, t: t + x,
    "x - t": lambda x, t: x - t,
    "t - x": lambda x, t: t - x,
    "2 x": lambda x, t: 2.0 * x,
    "x t": lambda x, t: x * t,
    "-x": lambda x, t: -x,
    "|x|": lambda x, t: abs(x),
    "array + x": lambda x, t: np.ones(8, np.float32) + x,
    "tf.abs": lambda x, t: tf.abs(x),
    "bitcast": lambda x, t: tf.bitcast(x, tf.int32),
    "raw op": lambda x, t: tf.raw_ops.Neg(x=x),
    "cast": lambda x, t: tf.cast(x, "bfloat16"),
    "cast to the same": lambda x, t: tf.cast(x, tf.float32),
    "gather": lambda x, t: tf.gather(x, [1, 5]),
    "where": lambda x, t: tf.where(t > 3, x, t),
    "clip": lambda x, t: tf.clip_by_value(x, -t, t),
    "stack": lambda x, t: tf.stack([x, t]),
    "split": lambda x, t: tf.concat(tf.split(x, [3, 5])[::-1], 0),
}


@pytest.mark.sample(20)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("in_graph", [False, True])
def test_parts_are_used_as_the_flat_vector(use, in_graph):
    array, parts = example()
    t = tf.range(8.0)
    result = tf.function(lambda: use(parts, t))() if in_graph else use(parts, t)
    np.testing.assert_array_equal(result, use(tf.constant(array), t))


def test_parts_look_like_the_flat_vector():
    array, parts = example()
    assert parts.shape == [8] and parts.shape[0] == 8 and parts.dtype == tf.float32
    assert len(parts) == 2 and [t.shape for t in parts] == [[2, 2], [2, 2]]
    for same in (parts.numpy(), parts, tf.convert_to_tensor(parts, tf.float32)):
        np.testing.assert_array_equal(same, array)
    assert bits(parts) == bits(array)
    empty = SplitVector([tf.zeros([0, 3]), tf.zeros([])])
    assert empty.shape == [1]


def test_parts_refuse_what_they_are_not():
    with pytest.raises(ValueError, match=r"at least.* Received: tensors=\(\)"):
        SplitVector([])
    with pytest.raises(ValueError, match="int32"):
        tf.convert_to_tensor(example()[1], tf.int32)


def test_parts_are_a_leaf_and_leave_a_function_as_the_flat_vector():
    array, parts = example()
    assert tf.nest.flatten({"a": parts}) == [parts]
    np.testing.assert_array_equal(tf.function(lambda: parts)(), array)

    @tf.function
    def either(flag):
        return tf.cond(flag, lambda: parts, lambda: tf.zeros(8))

    np.testing.assert_array_equal(either(tf.constant(True)), array)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_gain_multiplies_before_all_else(in_graph):
    array = np.random.default_rng(0).normal(size=999).astype(np.float32)

    def use():
        return np.float32(0.1) * SplitVector(tf.split(tf.constant(array), 3), 3.0)

    result = tf.function(use)() if in_graph else use()
    assert bits(result) == bits(np.float32(0.1) * (np.float32(3) * array))


def test_a_size_may_be_unknown():
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def joined(x):
        parts = SplitVector([x, tf.ones([2, 2])])
        assert parts.shape.as_list() == [None]
        return tf.convert_to_tensor(parts)

    np.testing.assert_array_equal(joined(tf.zeros(1)), [0, 1, 1, 1, 1])


# -- Operations ---------------------------------------------------------------------


SHAPES = [
    *((size, layout, 2, "normal") for size in SIZES for layout in ("one", "ragged")),
    *((1000, "buckets of 100", 3, kind) for kind in ("zeros", "special")),
]


# The reference joins the tensors of a vector before all else.
OPS_AND_SHAPES = [
    pytest.param(ops, shape, id=f"{name}-{shape}")
    for name, ops, shapes in (
        ("native", native, SHAPES),
        ("python", reference, [shape for shape in SHAPES if shape[0] == 65]),
    )
    for shape in shapes
]


# Of special numbers a product of TensorFlow's may flush denormals, one of NumPy's not.
# Without a gain the reference, which takes ten times as long, has the same bits.
@pytest.mark.parametrize("shape", SHAPES[2:-1], ids=str)
@needs_library
def test_a_gain_is_as_good_as_a_product(shape):
    scale = 3.0 if shape[1] == "one" else 0.5
    for what, name, (x, *args) in made(shape):
        if name not in READERS:
            continue
        with np.errstate(all="ignore"):
            product = np.float32(scale) * x
        cut = SplitVector(tf.split(tf.constant(x), cases.cuts(len(x))), scale)
        result = cases.flat(on_tensors(native, name, (product, *args)))
        cases.same_results(on_tensors(native, name, (cut, *args)), result, what)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ops", "shape"), OPS_AND_SHAPES)
@needs_library
def test_the_same_bits_however_a_gradient_is_cut(ops, shape):
    for seed in range(2):
        for what, name, (x, *args), result in expected_calls(shape, READERS):
            cut = parts_of(x, cases.cuts(len(x), seed))
            cases.same_results(on_tensors(ops, name, (cut, *args)), result, what)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ops", "shape"), OPS_AND_SHAPES)
@needs_library
def test_the_same_bits_however_values_are_cut(ops, shape):
    for seed in range(2):
        for what, name, args, result in expected_calls(shape, WRITERS):
            sizes = cases.cuts(shape[0], seed)
            parts = on_tensors(ops, name, args, sizes=sizes)
            assert isinstance(parts, SplitVector)
            assert [part.shape for part in parts] == [[size] for size in sizes]
            cases.same_results(parts.numpy(), result, what)


def test_a_vector_in_one_part_of_any_shape(ops):
    x = cases.floats(600)
    expected = reference.pack_signs(tf.constant(x))
    for shape in ([600], [2, 3, 100], [600, 1]):
        cases.same(ops.pack_signs(SplitVector([tf.reshape(x, shape)])), expected)


@pytest.mark.slow
def test_shapes_are_static(ops):
    x, m = tf.constant(cases.floats(100)), tf.zeros(100)
    words, scale, splits = tf.zeros([2, 4], tf.int32), tf.ones([2, 1]), [0, 100]
    stream = tf.constant([7, 3, 0], tf.int64)

    @tf.function
    def traced(x):
        parts = SplitVector(tf.split(x, [0, 33, 67]))
        signs, nonfinite = ops.pack_signs_checked(parts)
        assert (signs.shape, nonfinite.shape) == ([4], [])
        signs, m_new, nonfinite = ops.pack_momentum_signs(parts, m, 0.9, False, stream)
        assert (signs.shape, m_new.shape, nonfinite.shape) == ([4], [100], [])
        ternary = ops.pack_ternary(parts, scale[0], scale[0], splits, stream)
        assert ternary.shape == [5]
        assert ops.block_statistics(parts, splits).l1.shape == [1]
        levels, nonfinite = ops.find_levels(parts, splits, "optimal", 9)
        assert (levels.shape, nonfinite.shape) == ([1, 9], [])
        assert ops.pack_levels(parts, levels, splits, stream).shape == [10]
        assert ops.pack_levels(parts, levels, splits).shape == [10]
        signs, mean, m_new, left = ops.sign_error_feedback(
            parts, m, m, 0.9, tf.constant(1.0), tf.constant(True), splits
        )
        assert (signs.shape, mean.shape) == ([4], [1])
        assert m_new.shape == left.shape == [100]
        values = ops.mean_of_signs(words, scale, splits, sizes=(99, 0, 1))
        assert [part.shape for part in values] == [[99], [0], [1]]
        table = tf.ones([2, 1, 2])
        values = ops.mean_of_levels(words, table, splits, sizes=(99, 0, 1))
        assert [part.shape for part in values] == [[99], [0], [1]]
        return signs

    traced(x)


def test_a_gpu_gets_one_tensor(monkeypatch):
    array, parts = example()
    monkeypatch.setattr("tfgradcomp.ops.library.gpu_is_visible", lambda: True)
    words = np.zeros([1, 1], np.int32)

    @tf.function
    def both():
        values = native.mean_of_signs(words, [[2.0]], [0, 8], sizes=[3, 5])
        return native.pack_signs_checked(parts), values.tensors

    (signs, nonfinite), values = both()
    cases.same(signs, reference.pack_signs(tf.constant(array)))
    assert nonfinite == 0 and [v.numpy().tolist() for v in values] == [
        [-2] * 3,
        [-2] * 5,
    ]
    found = {op.type: op for op in both.get_concrete_function().graph.get_operations()}
    assert found["Tfgradcomp>PackSigns"].get_attr("num_parts") == 1
    assert found["Tfgradcomp>MeanOfSigns"].get_attr("num_values") == 1


# -- What is not finite -------------------------------------------------------------

NONFINITE = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize("size", [1, 31, 33, 1000, 300_007])
def test_what_is_not_finite_is_counted(ops, size):
    rng = np.random.default_rng(size)
    for share in (0, 1 / size, 0.3, 1):
        # The largest numbers are finite; at the vector's end a group is padded.
        x = np.resize(np.array([3.4e38, -3.4e38, 0, 1e-45], np.float32), size)
        m = np.full(size, 3e38, np.float32)
        for vector in (x, m):
            chosen = rng.choice(size, round(share * size), replace=False)
            vector[chosen] = rng.choice(NONFINITE, len(chosen))
        for given in (tf.constant(x), parts_of(x, cases.cuts(size))):
            nonfinite = ops.pack_signs_checked(given)[1]
            assert nonfinite == np.sum(~np.isfinite(x)) and nonfinite.dtype == tf.int64
            args = (given, tf.constant(m), 0.5, True, tf.constant([7, 3, 0], tf.int64))
            _, m_new, nonfinite = ops.pack_momentum_signs(*args)
            assert nonfinite == np.sum(~np.isfinite(x) | ~np.isfinite(m_new))
            assert nonfinite == np.sum(~np.isfinite(x) | ~np.isfinite(m))


def test_a_momentum_that_overflows_is_counted(ops):
    x = tf.constant([3e38, -3e38, 1, 3e38])
    m = tf.constant([3e38, 3e38, 3e38, 1])
    stream = tf.constant([7, 3, 0], tf.int64)
    # Elements 0, 1 and 3; no training has such a coefficient.
    assert ops.pack_momentum_signs(x, m, -1.0, False, stream)[2] == 3


# -- Without TensorFlow: unaligned parts, each instruction set ----------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("offset", [0, 4, 12])
@pytest.mark.parametrize(
    "shapes", [WHOLE, pytest.param(SHAPES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_instruction_set_takes_parts(kernels, offset, shapes):
    kernels.offset = offset
    for shape in shapes:
        if shape[3] == "special":
            continue
        sizes = cases.cuts(shape[0])
        for what, name, (x, *args), result in expected_calls(shape, READERS):
            actual = kernels.call(name, np.split(x, np.cumsum(sizes)[:-1]), *args)
            cases.same_results(actual, result, what)
        for what, name, args, result in expected_calls(shape, WRITERS):
            actual = np.concatenate(kernels.call(name, *args, sizes=sizes))
            cases.same_results(actual, result, what)
