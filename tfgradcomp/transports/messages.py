"""Messages: the fields of a payload as one vector of 32-bit words.

Fields follow each other in the order of their declaration; a field of variable length
comes last. Codes are packed already (`tfgradcomp.core.word_format`). Other numbers keep
their bits: a float32 takes one word, two half floats share one (the first in the low
half), and a float64 takes two (the low half first).
"""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.core import Field, Fields
from tfgradcomp.ops import NOTHING


def words_in(field: Field) -> int:
    """Returns the number of 32-bit words of a field in a message."""
    if field.base is None:
        return -(-field.count * tf.as_dtype(field.dtype).size // 4)
    return field.length


def message_words(fields: dict[str, Field]) -> int:
    """Returns the number of 32-bit words of a message; the maximum if it varies."""
    return sum(words_in(field) for field in fields.values())


def fixed_words(fields: dict[str, Field]) -> int:
    """Returns the number of words before a message's field of variable length."""
    return sum(
        words_in(field) for field in fields.values() if not field.variable_length
    )


def has_variable_length(fields: dict[str, Field]) -> bool:
    """Returns whether messages with these fields vary in length."""
    return any(field.variable_length for field in fields.values())


def variable_length_words(
    payload: dict[str, tf.Tensor], fields: dict[str, Field]
) -> tf.Tensor | int:
    """Returns the number of words in a payload's fields of variable length."""
    return sum(tf.size(payload[n]) for n, f in fields.items() if f.variable_length)


def pack(payload: dict[str, tf.Tensor], fields: dict[str, Field]) -> tf.Tensor:
    """Joins fields `[..., length]` into words `[..., message_words(fields)]`."""
    parts = []
    for name, field in fields.items():
        values = payload[name]
        if field.variable_length:
            parts.append(values)
            continue
        shape = values.shape[:-1]
        per_word = 4 // values.dtype.size
        if per_word > 1:
            fill = [[0, 0]] * len(shape) + [[0, -field.count % per_word]]
            values = tf.reshape(tf.pad(values, fill), [*shape, -1, per_word])
        parts.append(tf.reshape(tf.bitcast(values, tf.int32), [*shape, -1]))
    return tf.concat(parts, -1)


def padded(words: tf.Tensor, size: tf.Tensor | int) -> tf.Tensor:
    """Pads the words of a field of variable length with -1 to `size` words."""
    return tf.pad(words, [[0, size - tf.size(words)]], constant_values=NOTHING)


def unpack(words: tf.Tensor, fields: dict[str, Field]) -> dict[str, tf.Tensor]:
    """Cuts words, shape `[..., words]`, into a tensor for each field.

    Returns:
        int32 words for codes, `[..., count]` of the field's type for numbers, and all
        remaining words for a field of variable length.
    """
    payload, begin = {}, 0
    for name, field in fields.items():
        if field.variable_length:
            payload[name] = words[..., begin:]
            continue
        end = begin + words_in(field)
        part = _cut(words, begin, end)
        payload[name] = _numbers(part, field) if field.base is None else part
        begin = end
    return payload


def joined_numbers(tensors: Fields, fields: dict[str, Field]) -> tf.Tensor:
    """Returns the numbers of fields of one type as a vector."""
    return tf.concat([tensors[name] for name in fields], 0)


def split_numbers(vector: tf.Tensor, fields: dict[str, Field]) -> Fields:
    """Returns the fields that `joined_numbers` joined."""
    parts = tf.split(vector, [field.count for field in fields.values()])
    return dict(zip(fields, parts, strict=True))


def _numbers(words, field):
    shape, size = words.shape[:-1], tf.as_dtype(field.dtype).size
    if size > 4:
        words = tf.reshape(words, [*shape, field.count, size // 4])
    values = tf.bitcast(words, field.dtype)
    return _cut(tf.reshape(values, [*shape, -1]), 0, field.count)


def _cut(values, begin, end):
    """Returns a part of the last axis; without an operation if it is the whole."""
    is_whole = values.shape[-1] == end - begin
    return values if is_whole else values[..., begin:end]
