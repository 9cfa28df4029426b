"""Codes in words, against a reference written digit by digit."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tfgradcomp import ops

BASES = (2, 3, 5, 7, 9, 17, 33, 129, 256, 257, 65536, 65537, 2**31, 2**32)
SIZES = (0, 1, 2, 3, 19, 20, 21, 31, 32, 33, 63, 64, 65, 1000)


def codes_of(base, count, seed=0):
    return np.random.default_rng([seed, base, count]).integers(0, base, count)


def as_tensor(codes):
    # Codes above 2**31 sit in an int32 by their bits, as they do on the ops.
    return tf.constant(codes.astype(np.uint32).view(np.int32))


@pytest.mark.parametrize(
    ("base", "digits"),
    [(2, 32), (3, 20), (5, 13), (9, 10), (17, 7), (256, 4), (257, 3), (65536, 2)]
    + [(65537, 1), (2**32 - 1, 1), (2**32, 1)],
)
def test_digits_per_word(base, digits):
    assert ops.digits_per_word(base) == digits


@pytest.mark.parametrize("base", [-3, 0, 1, 2**32 + 1])
def test_a_bad_base_is_refused(base):
    with pytest.raises(ValueError, match=rf"base must be in .* Received: base={base}"):
        ops.digits_per_word(base)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", SIZES)
def test_words_are_those_of_the_reference(base, count):
    codes = codes_of(base, count)
    words = ops.pack_codes(as_tensor(codes), base)
    assert words.dtype == tf.int32
    np.testing.assert_array_equal(words, reference.pack(codes, base))
    declared = ops.words_for(count, base)
    assert words.shape == [declared]
    assert declared == -(-count // reference.digits_per_word(base))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", SIZES)
def test_round_trip(base, count):
    codes = as_tensor(codes_of(base, count, seed=1))
    again = ops.unpack_codes(ops.pack_codes(codes, base), base, count)
    assert again.dtype == tf.int32
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256, 65536, 2**32])
def test_the_largest_codes_fill_a_word_without_overflow(base):
    digits = reference.digits_per_word(base)
    codes = np.full(2 * digits, base - 1, np.uint64)
    words = ops.pack_codes(as_tensor(codes), base).numpy().view(np.uint32)
    np.testing.assert_array_equal(words, [base**digits - 1] * 2)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256])
def test_one_hot_positions(base):
    digits = reference.digits_per_word(base)
    for hot in range(2 * digits + 1):
        codes = np.zeros(2 * digits + 1, np.int32)
        codes[hot] = 1
        words = ops.pack_codes(tf.constant(codes), base).numpy().view(np.uint32)
        expected = np.zeros(3, np.uint64)
        expected[hot // digits] = base ** (hot % digits)
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("base", [2, 3, 5, 9])
def test_unused_digits_are_zero(base):
    words = ops.pack_codes(tf.constant([base - 1]), base)
    np.testing.assert_array_equal(words, [base - 1])
    everything = ops.unpack_codes(words, base, reference.digits_per_word(base))
    np.testing.assert_array_equal(everything[1:], 0)


@pytest.mark.parametrize("base", [2, 3, 9, 300, 2**32])
def test_unpacking_keeps_leading_axes(base):
    codes = codes_of(base, 6 * 37).reshape(2, 3, 37)
    words = np.stack([[reference.pack(row, base) for row in part] for part in codes])
    np.testing.assert_array_equal(
        ops.unpack_codes(tf.constant(words), base, 37),
        codes.astype(np.uint32).view(np.int32),
    )


@pytest.mark.parametrize("base", [2, 3, 9, 2**32])
def test_the_same_words_inside_compiled_functions(base):
    codes = as_tensor(codes_of(base, 65))

    @tf.function(jit_compile=True)
    def there_and_back(codes):
        words = ops.pack_codes(codes, base)
        return words, ops.unpack_codes(words, base, 65)

    words, again = there_and_back(codes)
    np.testing.assert_array_equal(words, reference.pack(codes_of(base, 65), base))
    np.testing.assert_array_equal(again, codes)
