"""Vectors of more than 2**31 elements, by shapes alone: none is allocated."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tests.methods import parts_of
from tests.ops.arguments import CALLS
from tests.ops.implementations import native
from tests.selection import rows, rows_by_compressor
from tfgradcomp.collectives import Loopback
from tfgradcomp.compressors import DGC, RandomK, TopK
from tfgradcomp.core import Layout, SplitVector
from tfgradcomp.ops import digits_per_word
from tfgradcomp.ops.registry import OPERATIONS
from tfgradcomp.testing.inputs import second_moments_of
from tfgradcomp.transports import AllGather, AllReduce, Sharded, messages

SMALL, LARGE = 5, 2**33 + 7
SPLITS = [0, 2**31 + 1, LARGE]
BASES = {"pack_codes": 3, "unpack_codes": 3, "sum_codes": 3, "sum_levels": 3}
BASES |= {"mean_of_levels": 3, "majority_vote": 3}
SPARSE = ("pack_unambiguous", "pack_over_threshold", "mean_of_sparse")
# Whose vectors have an index for each element.
LIMITED = (*SPARSE, "find_largest", "clear_elements", "mean_of_pairs")
BY_CHUNKS = ("pack_largest", "mean_of_largest")


def words_for(count, base):
    return -(-count // digits_per_word(base))


def enlarged(name, argument, value):
    """A valid argument of five elements, as one of more than 2**33."""
    if argument == "row_splits":
        return SPLITS
    if argument == "rows":
        return [value[0], value[1] + LARGE - SMALL]
    if argument == "count" and name != "find_levels":
        return LARGE
    shape = np.shape(value)
    if not isinstance(value, np.ndarray) or argument == "stream":
        return value
    if name in BY_CHUNKS and argument in ("words", "levels"):
        size = [shape[-1]]  # Those of a block, which may not be large.
    elif argument in ("words", "sent_words"):
        size = [words_for(LARGE, BASES.get(name, 2))]
    else:
        size = [LARGE if shape[-1:] == (SMALL,) else shape[-1]]
    return tf.TensorSpec([*shape[:-1], *size], value.dtype)


@pytest.mark.parametrize("name", [n for n in OPERATIONS if n not in LIMITED])
def test_shapes_of_native_operations(name):
    small, large = CALLS[name], {}
    for argument, value in small.items():
        large[argument] = enlarged(name, argument, value)
    specs = {k: v for k, v in large.items() if isinstance(v, tf.TensorSpec)}
    rest = {k: v for k, v in large.items() if k not in specs}
    traced = tf.function(lambda given: getattr(native, name)(**given, **rest))
    with tf.device("CPU:0"):
        found = traced.get_concrete_function(specs).structured_outputs
        expected = getattr(native, name)(**small)
    reply = {"sum_codes": 7, "majority_vote": 2}.get(name, BASES.get(name, 2))
    reply = 3 if name in ("pack_ternary", "pack_levels") else reply
    for big, one in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        shape = one.shape.as_list()
        if shape[-1:] == [SMALL] and name != "find_levels":
            shape[-1] = LARGE
        elif shape and one.dtype == tf.int32 and name not in BY_CHUNKS:
            shape[-1] = words_for(LARGE, reply)
        assert big.shape.as_list() == shape


def test_parts_of_a_large_vector():
    sizes = [2**31 + 1, 0, LARGE - 2**31 - 1]
    parts = [tf.TensorSpec([size], tf.float32) for size in sizes]
    stream = np.zeros(3, np.int64)

    @tf.function
    def there_and_back(parts):
        words, _ = native.pack_signs_checked(SplitVector(parts), stream)
        scale = tf.ones([1, 2])
        return words, list(
            native.mean_of_signs(words[tf.newaxis], scale, SPLITS, sizes)
        )

    words, values = there_and_back.get_concrete_function(parts).structured_outputs
    assert words.shape == [2**28 + 1]
    assert [value.shape[0] for value in values] == sizes


@pytest.mark.parametrize("size", [2**31, 2**48 + 1])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_words_refuse_what_no_index_reaches(name, size):
    small = CALLS[name]
    large = {k: [0, 2, size] if k == "row_splits" else v for k, v in small.items()}
    specs = {
        k: tf.TensorSpec([size], v.dtype)
        for k, v in small.items()
        if np.shape(v) == (SMALL,)
    }
    rest = {k: v for k, v in large.items() if k not in specs}
    traced = tf.function(lambda given: getattr(native, name)(**given, **rest))
    with pytest.raises(ValueError, match="less than 268435456 elements"):
        traced.get_concrete_function(specs)


# As a plan cuts a model of many large tensors, and blocks that shards share.
LAYOUT = Layout.from_sizes([2**31 + 3, 5, LARGE], block_size=2**30 - 1)
WITH_INDICES = (TopK, DGC, RandomK)
TRANSPORTS = (AllGather, AllReduce, Sharded)


def fits(row):
    """Returns whether a method takes any size; with an index an element it does not."""
    if row.method.compressor.most_elements is not None:
        return False
    return not any(isinstance(part, WITH_INDICES) for part in parts_of(row.compressor))


@pytest.mark.sample(1)
@rows_by_compressor(fits)
def test_messages_of_every_method(row):
    compressor = row.method.compressor

    @tf.function
    def compress(x):
        moments = second_moments_of(x)
        context = make_context(moments=moments)
        state = compressor.init(LAYOUT)
        payload, _, _ = compressor.compress(x, state, LAYOUT, context)
        return messages.pack(payload, compressor.fields(LAYOUT))

    x = tf.TensorSpec([LAYOUT.size], tf.float32)
    packed = compress.get_concrete_function(x).structured_outputs
    fields = compressor.fields(LAYOUT)
    assert packed.shape == [messages.message_words(fields)]
    for field in fields.values():
        if field.per == "element" and field.base:
            assert field.count == LAYOUT.size
            assert messages.words_in(field) == words_for(LAYOUT.size, field.base)

    @tf.function
    def decompress(words):
        payload = messages.unpack(words, fields)
        return tf.convert_to_tensor(compressor.decompress(payload, LAYOUT))

    words = tf.TensorSpec(packed.shape, tf.int32)
    update = decompress.get_concrete_function(words).structured_outputs
    assert update.shape == [LAYOUT.size]


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda t: t.__name__)
@rows(fits)
def test_shards_of_every_method(row, transport):
    num_workers = 3
    one = transport(Loopback(num_workers).collectives(1))
    if not one.supports(row.method, LAYOUT):
        return
    route = one.bind(row.method, LAYOUT, "large")
    assert all(call.words > 0 for call in route.calls)
    assert route.words.sent >= words_for(LAYOUT.size, 2)
    owned = [route.owned_range(rank) for rank in range(num_workers)]
    if len({*owned}) > 1:
        assert owned[0].start == 0 and owned[-1].stop == LAYOUT.size
        assert all(a.stop == b.start for a, b in itertools.pairwise(owned))
    else:
        assert set(owned) == {range(LAYOUT.size)}


@pytest.mark.parametrize("compressor", [TopK(0.1), DGC(0.1), RandomK(0.1)])
def test_what_int32_does_not_number_is_refused(compressor):
    most = Layout.from_sizes([2**31 - 1])
    first = next(iter(compressor.fields(most).values()))
    assert first.count in (214748365, 2 * 214748365)
    for size in (2**31, 2**33):
        with pytest.raises(ValueError, match=f"exclude=.*Received: .* {size} elements"):
            compressor.fields(Layout.from_sizes([size]))
