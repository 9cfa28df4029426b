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


@pytest.mark.sample(1)
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


def arbitrary_messages(rng, rows, length):
    """Delta messages of random words, and others that were encoded, with a bit changed.

    Any number of bits of a gap is in their headers.
    """
    words = rng.integers(0, 2**32, [rows, length], dtype=np.uint32)
    words[rng.random([rows, length]) < 0.1] = 2**32 - 1
    words[:, 0] = rng.integers(0, 25, rows)
    if length < 8:
        return words
    encoded = np.full([20, length], 2**32 - 1, np.uint32)
    for row, gap in zip(encoded, rng.integers(1, 10**6, len(encoded)), strict=True):
        index = np.cumsum(rng.integers(1, gap + 1, length - 1))
        given = tf.constant(words_of(index, 15))
        message = index_coding.encode(given, "delta", 4).numpy().view(np.uint32)
        row[: len(message)] = message[:length]
    half = rows // 2
    words[:half] = rng.choice(encoded, half)
    changed = rng.integers(1, length, half)
    words[np.arange(half), changed] ^= np.uint32(1) << rng.integers(
        0, 32, half, dtype=np.uint32
    )
    return words


@pytest.mark.parametrize(
    "count",
    [600, pytest.param(10**6, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_arbitrary_messages_are_words_in_order(count):
    rng = np.random.default_rng(count)
    rows = min(count // 6, 10_000)
    for turn in range(count // rows):
        value_bits = 1 if turn % 2 else 4
        length = (1, 2, 5, 8, 9, 12)[turn % 6]
        messages = arbitrary_messages(rng, rows, length)
        decoded = index_coding.decode(
            tf.constant(messages.view(np.int32)), "delta", value_bits
        )
        for words, message in zip(decoded.numpy(), messages, strict=True):
            expected = [
                (index, value)
                for index, value in read(message, value_bits)
                # A gap never leads so far, but in a message that nobody has encoded.
                if index < 2**28 and (index, value) != (2**28 - 1, 15)
            ]
            index, value = words & 2**28 - 1, words.view(np.uint32) >> 28
            found = list(zip(index.tolist(), value.tolist(), strict=True))
            assert found[: len(expected)] == expected
            assert (words[len(expected) :] == -1).all()


@pytest.mark.parametrize("value_bits", [1, 4])
def test_a_message_without_a_header_is_an_error(value_bits):
    good = np.array([[0, 7], [24, 5], [3, -1]], np.int32)
    index_coding.decode(tf.constant(good), "delta", value_bits)
    rng = np.random.default_rng(0)
    limits = [-1, -value_bits, -value_bits - 1, 25, 28, 31, 32, 60, 63, 64]
    drawn = rng.integers(-(2**31), 2**31, 200)
    for header in [*limits, 2**31 - 1, -(2**31), *drawn[(drawn < 0) | (drawn > 24)]]:
        bad = good.copy()
        bad[1, 0] = header
        with pytest.raises(tf.errors.InvalidArgumentError, match="from 0 to 24.*Recei"):
            index_coding.decode(tf.constant(bad), "delta", value_bits)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must begin with"):
        index_coding.decode(tf.zeros([2, 0], tf.int32), "delta", value_bits)
