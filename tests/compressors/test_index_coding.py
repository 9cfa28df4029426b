"""Messages of sparse words: what comes back, and how long they are."""

import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp.compressors import index_coding


def words_of(index, values):
    """Words of elements with 4 value bits each."""
    words = np.asarray(values, np.int64) << 28 | np.asarray(index, np.int64)
    return words.astype(np.uint32).view(np.int32)


def read(message, value_bits):
    """Decodes a delta message bit by bit: pairs of index and value bits."""
    gap_bits, *stream = (int(word) for word in message.view(np.uint32))
    if gap_bits == 0:
        return [(w & 2**28 - 1, w >> 28) for w in stream if w != 2**32 - 1]
    bits = sum(word << 32 * place for place, word in enumerate(stream))
    width = value_bits + gap_bits
    found, index = [], -1
    for _ in range(32 * len(stream) // width):
        field, bits = bits & 2**width - 1, bits >> width
        gap = field & 2**gap_bits - 1
        if field == 2**width - 1:
            index += gap
        else:
            index += gap + 1
            found.append((index, field >> gap_bits << (4 - value_bits)))
    return found


def shortest(index, value_bits):
    """Words of the shortest message, tried one by one."""
    gaps = np.diff(index, prepend=-1) - 1
    lengths = [len(index)]
    for bits in range(1, 25):
        fields = sum(1 + int(gap) // (2**bits - 1) for gap in gaps)
        lengths.append(-(-fields * (value_bits + bits) // 32))
    return 1 + min(lengths)


def sets():
    """Random sparse sets, and those at the limits."""
    rng = np.random.default_rng(0)
    for size, share in [(1, 0), (1, 1), (40, 0.5), (5000, 0.01), (5000, 0.3), (900, 1)]:
        yield np.flatnonzero(rng.random(size) < share)
    for few in (1, 3, 200):
        yield np.unique(rng.integers(0, 2**28 - 1, few))
    yield [2**28 - 2]
    yield [0, 2**28 - 2]
    # Dense at one place and far from there: fields that skip.
    yield [*range(100, 400), 2**24 + 500, *range(2**24 + 600, 2**24 + 900)]
    for gap in (1, 2, 3, 6, 7, 8, 14, 15, 30, 31):
        yield gap * np.arange(1, 70) - 1


@pytest.mark.parametrize("value_bits", [1, 4])
def test_delta_messages_come_back(value_bits):
    encode = tf.function(
        lambda words: index_coding.encode(words, "delta", value_bits),
        input_signature=[tf.TensorSpec([None], tf.int32)],
    )
    messages, expected = [], []
    rng = np.random.default_rng(value_bits)
    for index in sets():
        high = 16 if value_bits == 4 else 2
        values = rng.integers(0, high, len(index)) << (4 - value_bits)
        # All ones is a value like any other.
        values[::2] = (high - 1) << (4 - value_bits)
        words = words_of(index, values)
        message = encode(words).numpy()
        assert len(message) == shortest(np.array(index, np.int64), value_bits)
        pairs = list(zip(map(int, index), map(int, values), strict=True))
        assert read(message, value_bits) == pairs
        messages.append(message)
        expected.append(words)
    # All at once, each padded to the longest and more.
    longest = max(map(len, messages)) + 3
    rows = [np.pad(m, (0, longest - len(m)), constant_values=-1) for m in messages]
    decode = tf.function(lambda rows: index_coding.decode(rows, "delta", value_bits))
    decoded = decode(tf.constant(np.stack(rows))).numpy()
    for row, words in zip(decoded, expected, strict=True):
        np.testing.assert_array_equal(row[: len(words)], words)
        assert (row[len(words) :] == -1).all()


def test_fixed_messages_are_the_words():
    words = tf.constant(words_of([3, 9], [1, 15]))
    assert index_coding.encode(words, "fixed", 4) is words
    assert index_coding.decode(words[tf.newaxis], "fixed", 4).shape == [1, 2]


def test_gaps_take_about_half_of_the_bits():
    """One in a thousand: 32 bits with the index, 4 or 1 and some 11 with the gap."""
    index = np.flatnonzero(np.random.default_rng(1).random(10**6) < 1e-3)
    for value_bits, limit in ((4, 17.0), (1, 14.0)):
        message = index_coding.encode(
            tf.constant(words_of(index, 8 + 0 * index)), "delta", value_bits
        )
        assert 32 * len(message) / len(index) < limit
