"""Arbitrary words: native operations and the reference make the same of them.

What a faulty network, or a hostile one, delivers is an error or a number, and the same
one everywhere. tests/ops/fuzz.cc does so for the kernels by themselves.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops import cases
from tests.ops.implementations import native, reference

# Of one digit a word, of digits that leave room above the largest word, and without.
BASES = (2, 3, 5, 17, 255, 256, 257, 1625, 1626, 65535, 65537, 2**31, 2**32 - 1, 2**32)
EXTREME = np.array(
    [0, 1, 2**28 - 1, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 3**20 - 1, 3**20, 65537],
    np.uint32,
)


def arbitrary(rng, shape):
    """Words of random bits; some at the limits, some with few bits."""
    words = rng.integers(0, 2**32, shape, dtype=np.uint32)
    kind = rng.integers(0, 4, shape)
    words = np.where(kind == 0, rng.choice(EXTREME, shape), words)
    return np.where(kind == 1, words & rng.integers(0, 2**32, shape), words).astype(
        np.uint32
    )


def tensor(words):
    return tf.constant(words.view(np.int32))


def scales(rng, shape):
    """Random numbers with infinities and NaN; the reference flushes denormals."""
    numbers = rng.normal(size=shape).astype(np.float32)
    return tf.constant(
        np.where(
            rng.random(shape) < 0.1, rng.choice(cases.SPECIAL[2:6], shape), numbers
        )
    )


def decoders(rng, workers, size):
    """Calls of all that decode words: (name, arguments)."""
    splits = sorted({0, size, *map(int, rng.integers(1, size, 5))})
    blocks = len(splits) - 1
    for form in cases.CHUNKS:
        ends = cases.chunks(splits, form.chunk)
        words = tensor(arbitrary(rng, [workers, (len(ends) - 1) * form.words]))
        levels = scales(rng, [workers, len(ends) - 1, form.levels])
        yield "mean_of_largest", (words, levels, ends, *form)
    for base in BASES:
        length = -(-size // max(k for k in range(1, 33) if base**k <= 2**32))
        words = tensor(arbitrary(rng, [workers, length]))
        yield "unpack_codes", (words, base, size)
        if workers * (base - 1) < 2**31 - 1000:
            yield "sum_codes", (words, base, size)
            yield "sum_levels", (words, scales(rng, [blocks]), splits, base, 1, 99)
        if base <= 1626:
            levels = scales(rng, [workers, blocks, base])
            yield "mean_of_levels", (words, levels, splits)
        if base == 2:
            yield "mean_of_signs", (words, scales(rng, [workers, blocks]), splits)
        if base <= 3:
            stream = tf.constant(rng.integers(0, 2**62, 3))
            for reply_base, quorum in ((2, 0), (3, 0), (3, 2)):
                given = (words, size, base, reply_base, quorum)
                yield "majority_vote", given
                yield "majority_vote", (*given, stream)


@pytest.mark.parametrize("size", [997, pytest.param(300_001, marks=pytest.mark.slow)])
def test_arbitrary_words_are_one_number(size):
    rng = np.random.default_rng(size)
    for workers in (1, 2, 5):
        for name, args in decoders(rng, workers, size):
            cases.same_results(
                getattr(native, name)(*args),
                getattr(reference, name)(*args),
                (name, workers, *args[1:]),
            )


def sparse_words(rng, rows, length, size):
    """Rows of words; whether the indices of all rows increase, up to the nothings."""
    words = arbitrary(rng, [rows, length])
    if rng.random() < 0.7:
        # Of elements inside the vector and beyond it, and one word that is changed.
        step = max(1, 2 * size // length)
        index = np.cumsum(rng.integers(1, step + 1, [rows, length]), 1)
        words = (words & 0xF0000000) | index.astype(np.uint32)
        if rng.random() < 0.5:
            row, at, bit = rng.integers([rows, length, 28])
            words[row, at] ^= np.uint32(1 << bit)
    index = np.minimum((words & 0x0FFFFFFF).astype(np.int64), size)
    before, after = index[:, :-1], index[:, 1:]
    return words, bool(((before < after) | (after == size)).all())


@pytest.mark.slow
@pytest.mark.parametrize("turns", [300, 3000])
def test_sparse_words_are_one_number_or_out_of_order(turns):
    rng = np.random.default_rng(turns)
    seen = set()
    for _ in range(turns):
        size, rows, length = rng.integers([1, 1, 0], [3000, 4, 60])
        splits = sorted({0, int(size), *map(int, rng.integers(1, size + 1, 3))})
        words, is_ordered = (
            sparse_words(rng, rows, length, size)
            if length
            else (np.zeros([rows, 0], np.uint32), True)
        )
        scale = scales(rng, [rows, len(splits) - 1])
        results = []
        for operations in (native, reference):
            try:
                results.append(
                    operations.mean_of_sparse(tensor(words), scale, splits).numpy()
                )
            except tf.errors.InvalidArgumentError as error:
                assert "words must have increasing indices" in str(error)
                assert "Received: " in str(error)
                assert not is_ordered
        seen.add(is_ordered)
        assert len(results) == (2 if is_ordered else 0)
        if is_ordered:
            cases.same(*results)
    assert seen == {True, False}
