"""Random numbers: Philox-4x32-10, in the streams that a context names."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp import ops

# Known answers of Random123 (Salmon et al.): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        2**64 - 1,
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        0x299F31D0A4093822,
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words_of(text):
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_the_reference_gives_the_known_answers(counter, key, output):
    (row,) = reference.philox_4x32_10(words_of(counter)[np.newaxis], key)
    np.testing.assert_array_equal(row, words_of(output))


def test_the_package_gives_the_known_answer():
    drawn = ops.random_bits(make_context().random_stream(shared=True), 4)
    assert drawn.dtype == tf.uint32
    np.testing.assert_array_equal(drawn, words_of(KNOWN[0][2]))


@pytest.mark.sample(46)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 1001])
@pytest.mark.parametrize("seed", [0, 1, 0x299F31D0A4093822, 2**63 - 1])
@pytest.mark.parametrize(
    ("step", "rank", "stream"), [(0, 0, 0), (1, 0, 1), (12345, 7, 2), (2**39, 1000, 15)]
)
def test_bits_are_those_of_the_documented_counter(count, seed, step, rank, stream):
    context = make_context(step=step, seed=seed, rank=rank)
    np.testing.assert_array_equal(
        ops.random_bits(context.random_stream(stream), count),
        reference.random_bits(count, seed, step, rank, stream),
    )
    np.testing.assert_array_equal(
        ops.random_bits(context.random_stream(stream, shared=True), count),
        reference.random_bits(count, seed, step, None, stream),
    )
    np.testing.assert_array_equal(
        ops.uniform(context.random_stream(), count),
        reference.uniform(count, seed, step, rank),
    )


@pytest.mark.parametrize("offset", [0, 128, 1024, 2**34 + 256])
def test_a_part_of_the_vector_draws_what_the_whole_draws_there(offset):
    context = make_context(step=3, seed=1, rank=2)._replace(offset=offset)
    part, whole = (1, 3 * 2**24 + 3 * 2**4 + 5, offset // 128), (1, 3 * 2**24 + 53, 0)
    for kind in ("bits", "uniform", "coins"):
        draw = getattr(ops, {"bits": "random_bits"}.get(kind, kind))
        drawn, oracle = draw(context.random_stream(5), 77), f"stream_{kind}"
        np.testing.assert_array_equal(drawn, getattr(reference, oracle)(77, *part))
        if offset < 2**20:
            expected = getattr(reference, oracle)(offset + 77, *whole)[offset:]
            np.testing.assert_array_equal(drawn, expected)


def test_compiled_functions_draw_the_same():
    @tf.function(jit_compile=True)
    def draw(step, rank):
        context = make_context(step=step, seed=9, rank=rank)
        stream = context.random_stream(3)
        return (
            ops.random_bits(stream, 77),
            ops.uniform(stream, 77),
            ops.coins(stream, 77),
        )

    drawn, of = draw(tf.constant(5), tf.constant(2)), reference.stream_of(9, 5, 2, 3)
    np.testing.assert_array_equal(drawn[0], reference.stream_bits(77, *of))
    np.testing.assert_array_equal(drawn[1], reference.stream_uniform(77, *of))
    np.testing.assert_array_equal(drawn[2], reference.stream_coins(77, *of))


def test_no_two_draws_of_a_run_are_alike():
    contexts = [make_context(step=s, rank=r) for s in range(4) for r in range(3)]
    streams = [c.random_stream(stream) for c in contexts for stream in range(3)]
    streams += [
        make_context(step=s).random_stream(stream, shared=True)
        for s in range(4)
        for stream in range(3)
    ]
    draws = {tuple(ops.random_bits(stream, 8).numpy()) for stream in streams}
    assert len(draws) == len(streams)


def test_the_server_draws_the_same_wherever_it_is():
    streams = {
        tuple(make_context(step=4, rank=r).at_server().random_stream().numpy())
        for r in range(3)
    }
    assert len(streams) == 1
