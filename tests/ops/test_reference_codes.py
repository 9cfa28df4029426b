"""Tests of random words and codes in pure TensorFlow against NumPy, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import STREAMS, layouts, same, tensor
from tests.ops.implementations import reference as ops
from tfgradcomp.ops import coins, random_bits, uniform

# Blocks' numbers pass 2^32 at element 384 of words, 512 of the rest.
FIRSTS = (0, 2**27 - 3, 2**29 - 4, 2**28 - 4, 2**32 - 4)


@pytest.mark.parametrize(
    "stream", [(0, 0, 0), *STREAMS, *((2**64 - 1, 2**64 - 2, i) for i in FIRSTS)]
)
@pytest.mark.parametrize("count", [0, 1, 3, 16, 17, 129, 1000])
def test_random_numbers_are_parts_of_philox(stream, count):
    same(
        random_bits(tensor(stream), count),
        oracle.stream_bits(count, *stream),
    )
    numbers = oracle.stream_uniform(count, *stream).astype(np.float32)
    same(uniform(tensor(stream), count), numbers)
    drawn = oracle.stream_coins(count, *stream).astype(np.int32)
    same(coins(tensor(stream), count), drawn)


def test_bits_are_counted_from_the_lowest_of_a_blocks_first_word():
    """The known answer of Random123 for a counter and a key of zeros, cut by hand."""
    stream, block = tensor((0, 0, 0)), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    same(random_bits(stream, 4), np.array(block, np.uint32))
    drawn = [int(bit) for word in block for bit in reversed(f"{word:032b}")]
    same(coins(stream, 128), np.array(drawn, np.int32))
    upper = (uniform(stream, 16).numpy() * 256).astype(int)
    assert "".join(f"{byte:02x}" for byte in upper[:8]) == "d5e827668dc569e1"
    # The lower bits are those of the block with the counter 2^63.
    counter = np.array([[0, 2**31, 0, 0]], np.uint32)
    halves = oracle.philox_4x32_10(counter, 0).view(np.uint16)[0]
    lower = (uniform(stream, 8).numpy() * 2.0**24).astype(int) % 2**16
    np.testing.assert_array_equal(lower, halves)


@pytest.mark.parametrize("base", cases.BASES)
@pytest.mark.parametrize("size", cases.SIZES)
def test_codes_and_words(base, size):
    codes = cases.codes(base, size)
    words = ops.pack_codes(tf.constant(codes), base)
    same(words, oracle.pack(codes.view(np.uint32), base))
    same(ops.unpack_codes(words, base, size), codes)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256])
def test_one_plus_among_others_at_every_position(base):
    digits = oracle.digits_per_word(base)
    for hot in range(2 * digits + 1):
        codes = np.zeros(2 * digits + 1, np.int32)
        codes[hot] = base - 1
        words = ops.pack_codes(tf.constant(codes), base).numpy().view(np.uint32)
        expected = np.zeros(3, np.uint64)
        expected[hot // digits] = (base - 1) * base ** (hot % digits)
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("base", [2, 3, 9, 300, 2**32])
def test_unpacking_keeps_leading_axes(base):
    words = cases.words(base, 6, 37).reshape(2, 3, -1)
    codes = [[oracle.unpack(row, base, 37) for row in part] for part in words]
    same(
        ops.unpack_codes(tf.constant(words), base, 37),
        np.array(codes, np.uint64).astype(np.uint32).view(np.int32),
    )


@pytest.mark.parametrize("base", [2, 3, 5, 17, 257])
@pytest.mark.parametrize("workers", cases.WORKERS)
@pytest.mark.parametrize("size", [0, 1, 21, 1000])
def test_sums_of_codes(base, workers, size):
    words = cases.words(base, workers, size)
    same(
        ops.sum_codes(tf.constant(words), base, size),
        oracle.sum_codes(words, base, size),
    )


def test_the_largest_codes_add_up_in_the_largest_base():
    words = np.full([1, 3], 2**32 - 1, np.uint32).view(np.int32)
    same(ops.sum_codes(tf.constant(words), 2**32, 3), words[0])
    words = np.full([3, 3], (2**32 - 1) // 3, np.uint32).view(np.int32)
    total = np.full([3], 2**32 - 1, np.uint32).view(np.int32)
    same(ops.sum_codes(tf.constant(words), (2**32 - 1) // 3 + 1, 3), total)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 17, 257])
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 21, 1000))
def test_levels(base, size, layout):
    splits = cases.row_splits(size, layout)
    scale = cases.positive(len(splits) - 1)
    for workers in (1, 3):
        words = cases.words(base, workers, size)
        zero = workers * (base - 1)
        values = ops.sum_levels(
            tf.constant(words), tf.constant(scale), splits, base, 2, zero
        )
        same(values, oracle.sum_levels(words, scale, splits, base, 2, zero))
