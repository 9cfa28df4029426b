"""The word format, against a reference written digit by digit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tfgradcomp.compressors import Field
from tfgradcomp.wire import words as wire

BASES = (2, 3, 5, 7, 9, 17, 33, 129, 256, 257, 65536, 65537, 2**31, 2**32)
SIZES = (0, 1, 2, 3, 19, 20, 21, 31, 32, 33, 63, 64, 65, 1000)


def codes_of(base, count, seed=0):
    return np.random.default_rng([seed, base, count]).integers(0, base, count)


def as_tensor(codes):
    # Codes above 2**31 sit in an int32 by their bits, as they do on the wire.
    return tf.constant(codes.astype(np.uint32).view(np.int32))


@pytest.mark.parametrize(
    ("base", "digits"),
    [(2, 32), (3, 20), (5, 13), (9, 10), (17, 7), (256, 4), (257, 3), (65536, 2)]
    + [(65537, 1), (2**32 - 1, 1), (2**32, 1)],
)
def test_digits_per_word(base, digits):
    assert wire.digits_per_word(base) == digits


@pytest.mark.parametrize("base", [-3, 0, 1, 2**32 + 1])
def test_a_bad_base_is_refused(base):
    with pytest.raises(ValueError, match=rf"base must be in .* Received: base={base}"):
        wire.digits_per_word(base)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", SIZES)
def test_words_are_those_of_the_reference(base, count):
    codes = codes_of(base, count)
    words = wire.pack_codes(as_tensor(codes), base)
    assert words.dtype == tf.int32
    np.testing.assert_array_equal(words, reference.pack(codes, base))
    declared = wire.words_in(Field(count, base))
    assert words.shape == [declared]
    assert declared == -(-count // reference.digits_per_word(base))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", SIZES)
def test_round_trip(base, count):
    codes = as_tensor(codes_of(base, count, seed=1))
    again = wire.unpack_codes(wire.pack_codes(codes, base), base, count)
    assert again.dtype == tf.int32
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256, 65536, 2**32])
def test_the_largest_codes_fill_a_word_without_overflow(base):
    digits = reference.digits_per_word(base)
    codes = np.full(2 * digits, base - 1, np.uint64)
    words = wire.pack_codes(as_tensor(codes), base).numpy().view(np.uint32)
    np.testing.assert_array_equal(words, [base**digits - 1] * 2)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256])
def test_one_hot_positions(base):
    digits = reference.digits_per_word(base)
    for hot in range(2 * digits + 1):
        codes = np.zeros(2 * digits + 1, np.int32)
        codes[hot] = 1
        words = wire.pack_codes(tf.constant(codes), base).numpy().view(np.uint32)
        expected = np.zeros(3, np.uint64)
        expected[hot // digits] = base ** (hot % digits)
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("base", [2, 3, 5, 9])
def test_unused_digits_are_zero(base):
    words = wire.pack_codes(tf.constant([base - 1]), base)
    np.testing.assert_array_equal(words, [base - 1])
    everything = wire.unpack_codes(words, base, reference.digits_per_word(base))
    np.testing.assert_array_equal(everything[1:], 0)


@pytest.mark.parametrize("base", [2, 3, 9, 300, 2**32])
def test_unpacking_keeps_leading_axes(base):
    codes = codes_of(base, 6 * 37).reshape(2, 3, 37)
    words = np.stack([[reference.pack(row, base) for row in part] for part in codes])
    np.testing.assert_array_equal(
        wire.unpack_codes(tf.constant(words), base, 37),
        codes.astype(np.uint32).view(np.int32),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 65])
def test_numbers_travel_as_their_bits(dtype, count):
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    values[0] = -0.0
    values = tf.cast(values, dtype)
    fields = {"values": Field(count, dtype=dtype)}
    words = wire.pack({"values": values}, fields)
    raw = values.numpy().tobytes()
    np.testing.assert_array_equal(
        words, np.frombuffer(raw + bytes(-len(raw) % 4), np.int32)
    )
    assert words.shape == [wire.message_words(fields)]
    assert wire.message_words(fields) == -(-count * values.dtype.size // 4)
    again = wire.unpack(words, fields)["values"]
    assert again.dtype == values.dtype
    assert again.numpy().tobytes() == raw


def test_a_message_is_its_fields_in_order():
    fields = {
        "codes": Field(21, base=3),
        "half": Field(3, dtype="bfloat16"),
        "scale": Field(2),
        "bits": Field(33, base=2),
    }
    payload = {
        "bits": tf.constant(codes_of(2, 33)),
        "scale": tf.constant([1.5, -2.0]),
        "half": tf.constant([1.0, 2.0, 3.0], tf.bfloat16),
        "codes": tf.constant(codes_of(3, 21)),
    }
    message = wire.pack(payload, fields)
    assert wire.message_words(fields) == 2 + 2 + 2 + 2 == message.shape[0]
    np.testing.assert_array_equal(message[:2], reference.pack(codes_of(3, 21), 3))
    # 1, 2 and 3 in bfloat16, two to a word, the first in the low half.
    np.testing.assert_array_equal(message[2:4], [0x40003F80, 0x4040])
    np.testing.assert_array_equal(
        message[4:6], np.array([1.5, -2.0], np.float32).view(np.int32)
    )
    np.testing.assert_array_equal(message[6:], reference.pack(codes_of(2, 33), 2))
    for batch in ([], [4], [2, 3]):
        messages = tf.broadcast_to(message, [*batch, 8])
        again = wire.unpack(messages, fields)
        assert list(again) == list(fields)
        for name, value in payload.items():
            expected = np.broadcast_to(value, [*batch, *value.shape])
            np.testing.assert_array_equal(again[name], expected)


@pytest.mark.parametrize("base", [2, 3, 9, 2**32])
def test_the_same_words_inside_compiled_functions(base):
    codes = as_tensor(codes_of(base, 65))

    @tf.function(jit_compile=True)
    def there_and_back(codes):
        words = wire.pack_codes(codes, base)
        return words, wire.unpack_codes(words, base, 65)

    words, again = there_and_back(codes)
    np.testing.assert_array_equal(words, reference.pack(codes_of(base, 65), base))
    np.testing.assert_array_equal(again, codes)
