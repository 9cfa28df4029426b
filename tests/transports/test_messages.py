"""Messages: the places of fields in a vector of words."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tfgradcomp.collectives import padded_size
from tfgradcomp.core import Field
from tfgradcomp.transports import messages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 65])
def test_numbers_are_sent_as_their_bits(dtype, count):
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    values[0] = -0.0
    values = tf.cast(values, dtype)
    fields = {"values": Field(count, dtype=dtype)}
    words = messages.pack({"values": values}, fields)
    raw = values.numpy().tobytes()
    np.testing.assert_array_equal(
        words, np.frombuffer(raw + bytes(-len(raw) % 4), np.int32)
    )
    assert words.shape == [messages.message_words(fields)]
    assert messages.message_words(fields) == -(-count * values.dtype.size // 4)
    again = messages.unpack(words, fields)["values"]
    assert again.dtype == values.dtype
    assert again.numpy().tobytes() == raw


def test_a_message_is_its_fields_in_order():
    fields = {
        "codes": Field(21, base=3),
        "half": Field(3, dtype="bfloat16"),
        "scale": Field(2),
        "bits": Field(33, base=2),
    }
    ternary = reference.pack(np.arange(21) % 3, 3)
    signs = reference.pack(np.arange(33) % 5 // 4, 2)
    payload = {
        "bits": tf.constant(signs),
        "scale": tf.constant([1.5, -2.0]),
        "half": tf.constant([1.0, 2.0, 3.0], tf.bfloat16),
        "codes": tf.constant(ternary),
    }
    message = messages.pack(payload, fields)
    assert messages.message_words(fields) == 2 + 2 + 2 + 2 == message.shape[0]
    np.testing.assert_array_equal(message[:2], ternary)
    # 1, 2 and 3 in bfloat16, two to a word, the first in the low half.
    np.testing.assert_array_equal(message[2:4], [0x40003F80, 0x4040])
    np.testing.assert_array_equal(
        message[4:6], np.array([1.5, -2.0], np.float32).view(np.int32)
    )
    np.testing.assert_array_equal(message[6:], signs)
    for batch in ([], [4], [2, 3]):
        rows = tf.broadcast_to(message, [*batch, 8])
        again = messages.unpack(rows, fields)
        assert list(again) == list(fields)
        for name, value in payload.items():
            expected = np.broadcast_to(value, [*batch, *value.shape])
            np.testing.assert_array_equal(again[name], expected)


def test_invalid_lengths_raise():
    words = tf.range(50)
    for length in (-(2**31), -1, 0, 48, 2**29, 2**31 - 1):
        with pytest.raises(tf.errors.InvalidArgumentError):
            messages.padded(words, padded_size(tf.constant(length)))
    assert messages.padded(words, padded_size(tf.constant(51))).shape == [52]


@pytest.mark.parametrize("rows", [1000, pytest.param(10**6, marks=pytest.mark.slow)])
def test_any_words_are_a_message(rows):
    fields = {
        "half": Field(3, dtype="bfloat16"),
        "sum": Field(2, dtype="float64"),
        "codes": Field(21, base=3),
        "exponents": Field(5, dtype="int8"),
        "scale": Field(1),
        "rest": Field(9, dtype="int32", variable_length=True),
    }
    words = np.random.default_rng(rows).integers(0, 2**32, [rows, 14], dtype=np.uint32)
    payload = messages.unpack(tf.constant(words.view(np.int32)), fields)
    raw = words.view(np.uint8)
    # The bytes of each field.
    for name, begin, end in [
        ("half", 0, 6),
        ("sum", 8, 24),
        ("codes", 24, 32),
        ("exponents", 32, 37),
        ("scale", 40, 44),
        ("rest", 44, 56),
    ]:
        value = np.ascontiguousarray(payload[name].numpy())
        np.testing.assert_array_equal(
            value.view(np.uint8).reshape(rows, -1), raw[:, begin:end], name
        )
