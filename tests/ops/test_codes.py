"""Tests of codes, words and sums, of both implementations, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp.ops
from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import layouts, same
from tfgradcomp.ops import digits_per_word, words_for


@pytest.mark.parametrize(
    ("base", "digits"),
    [(2, 32), (3, 20), (5, 13), (9, 10), (17, 7), (256, 4), (257, 3), (65536, 2)]
    + [(65537, 1), (2**32 - 1, 1), (2**32, 1)],
)
def test_digits_per_word(base, digits):
    assert digits_per_word(base) == digits


@pytest.mark.parametrize("base", [-3, 0, 1, 2**32 + 1])
def test_a_bad_base_is_refused(base):
    with pytest.raises(ValueError, match=rf"base must be in .* Received: base={base}"):
        digits_per_word(base)


@pytest.mark.parametrize("base", cases.BASES)
def test_codes_and_words(ops, base):
    for size in cases.SIZES:
        codes = cases.codes(base, size)
        words = ops.pack_codes(tf.constant(codes), base)
        same(words, oracle.pack(codes.view(np.uint32), base), size)
        assert words.shape == [words_for(size, base)]
        assert words_for(size, base) == -(-size // oracle.digits_per_word(base))
        same(ops.unpack_codes(words, base, size), codes, size)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256, 65536, 2**32])
def test_the_largest_codes_fill_a_word_without_overflow(ops, base):
    digits = oracle.digits_per_word(base)
    codes = np.full(2 * digits, base - 1, np.uint32).view(np.int32)
    words = ops.pack_codes(tf.constant(codes), base).numpy().view(np.uint32)
    np.testing.assert_array_equal(words, [base**digits - 1] * 2)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 256])
def test_one_code_among_zeros_at_every_position(ops, base):
    digits = oracle.digits_per_word(base)
    for hot in range(2 * digits + 1):
        for code in {1, base - 1}:
            codes = np.zeros(2 * digits + 1, np.int32)
            codes[hot] = code
            words = ops.pack_codes(tf.constant(codes), base).numpy().view(np.uint32)
            expected = np.zeros(3, np.uint64)
            expected[hot // digits] = code * base ** (hot % digits)
            np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("base", [2, 3, 5, 9])
def test_unused_digits_are_zero(ops, base):
    words = ops.pack_codes(tf.constant([base - 1]), base)
    np.testing.assert_array_equal(words, [base - 1])
    everything = ops.unpack_codes(words, base, oracle.digits_per_word(base))
    np.testing.assert_array_equal(everything[1:], 0)


@pytest.mark.parametrize("base", [2, 3, 9, 300, 2**32])
def test_unpacking_keeps_leading_axes(ops, base):
    words = cases.words(base, 6, 37).reshape(2, 3, -1)
    codes = [[oracle.unpack(row, base, 37) for row in part] for part in words]
    same(
        ops.unpack_codes(tf.constant(words), base, 37),
        np.array(codes, np.uint64).astype(np.uint32).view(np.int32),
    )


@pytest.mark.parametrize("base", [2, 3, 9, 2**32])
def test_the_same_words_inside_compiled_functions(base):
    codes = cases.codes(base, 65)

    @tf.function(jit_compile=True)
    def there_and_back(codes):
        words = tfgradcomp.ops.pack_codes(codes, base)
        return words, tfgradcomp.ops.unpack_codes(words, base, 65)

    words, again = there_and_back(tf.constant(codes))
    same(words, oracle.pack(codes.view(np.uint32), base))
    same(again, codes)


@pytest.mark.parametrize("base", [2, 3, 5, 17, 257])
@pytest.mark.parametrize("workers", cases.WORKERS)
def test_sums_of_codes(ops, base, workers):
    for size in (0, 1, 21, 1000):
        words = cases.words(base, workers, size)
        total = ops.sum_codes(tf.constant(words), base, size)
        same(total, oracle.sum_codes(words, base, size), size)


@pytest.mark.parametrize(
    ("workers", "top"), [(1, 2**32 - 1), (3, (2**32 - 1) // 3), (255, 2**24)]
)
def test_the_largest_codes_add_up_in_the_largest_base(ops, workers, top):
    words = np.full([workers, 37], top, np.uint32).view(np.int32)
    total = np.full(37, workers * top, np.uint32).view(np.int32)
    same(ops.sum_codes(tf.constant(words), top + 1, 37), total)


@pytest.mark.parametrize("base", [2, 3, 5, 9, 17, 257])
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 21, 1000))
def test_levels(ops, base, size, layout):
    splits = cases.row_splits(size, layout)
    scale = cases.positive(len(splits) - 1)
    for workers in (1, 3):
        words = cases.words(base, workers, size)
        zero = workers * (base - 1)
        values = ops.sum_levels(
            tf.constant(words), tf.constant(scale), splits, base, 2, zero
        )
        same(values, oracle.sum_levels(words, scale, splits, base, 2, zero))
