"""Tests of the random numbers of a stream against NumPy, bit for bit."""

import numpy as np
import pytest

from tests import reference as oracle
from tests.ops.cases import STREAMS, same, tensor
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
