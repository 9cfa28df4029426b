"""The word format, and the pure-TensorFlow codec: codes of base s in 32-bit words.

A wire word is int32. Codes of base s sit `digits_per_word(s)` = k to a word, least
significant digit first: element j is digit j mod k of word j // k. k is the largest
with s**k <= 2**32; unused digits are 0. For s = 2, element j is bit j mod 32.
Numbers that are no codes travel as their own bits: a float32 is a word, two half
floats share one, the first in the low half.

A message is the words of its fields, one after the other in the order of their
declaration.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfgradcomp.compressors.base import Field


def digits_per_word(base: int) -> int:
    """Returns how many codes of `base` fit into one 32-bit word.

    Raises:
        ValueError: If `base` is not in [2, 2**32].
    """
    if not 2 <= base <= 2**32:
        raise ValueError(f"base must be in [2, 2**32]. Received: base={base}")
    digits = 1
    while base ** (digits + 1) <= 2**32:
        digits += 1
    return digits


def words_in(field: Field) -> int:
    """Returns the number of 32-bit words that a field takes on the wire."""
    if field.base is None:
        return math.ceil(field.count * tf.as_dtype(field.dtype).size / 4)
    return math.ceil(field.count / digits_per_word(field.base))


def message_words(fields: dict[str, Field]) -> int:
    """Returns the number of 32-bit words of a message with these fields."""
    return sum(words_in(field) for field in fields.values())


def pack_codes(codes: tf.Tensor, base: int) -> tf.Tensor:
    """Packs integer codes in `[0, base)`, shape `[count]`, into int32 words."""
    digits = digits_per_word(base)
    count = codes.shape[0]
    rows = math.ceil(count / digits)
    padded = tf.pad(tf.cast(codes, tf.uint32), [[0, rows * digits - count]])
    table = tf.reshape(padded, [rows, digits])
    return tf.bitcast(tf.reduce_sum(table * _powers(base), axis=1), tf.int32)


def unpack_codes(words: tf.Tensor, base: int, count: int) -> tf.Tensor:
    """Unpacks int32 words, shape `[..., words]`, into int32 codes `[..., count]`."""
    column = tf.bitcast(words, tf.uint32)[..., tf.newaxis]
    if base == 2:
        shifts = tf.range(32, dtype=tf.int32)
        table = tf.bitwise.right_shift(column, tf.cast(shifts, tf.uint32)) & 1
    else:
        table = column // _powers(base)
        if base < 2**32:
            table = table % tf.constant(base, tf.uint32)
    shape = [*words.shape[:-1], words.shape[-1] * digits_per_word(base)]
    return tf.cast(tf.reshape(table, shape)[..., :count], tf.int32)


def _powers(base: int) -> tf.Tensor:
    return tf.constant([base**j for j in range(digits_per_word(base))], tf.uint32)


def pack(payload: dict[str, tf.Tensor], fields: dict[str, Field]) -> tf.Tensor:
    """Packs a payload into one int32 vector of `message_words(fields)` words."""
    parts = []
    for name, field in fields.items():
        if field.base is not None:
            parts.append(pack_codes(payload[name], field.base))
            continue
        values = payload[name]
        per_word = 4 // values.dtype.size
        if per_word > 1:
            values = tf.pad(values, [[0, -field.count % per_word]])
            values = tf.reshape(values, [-1, per_word])
        parts.append(tf.bitcast(values, tf.int32))
    return tf.concat(parts, 0)


def unpack(words: tf.Tensor, fields: dict[str, Field]) -> dict[str, tf.Tensor]:
    """Unpacks words, shape `[..., words]`, into a tensor `[..., count]` a field."""
    sizes = [words_in(field) for field in fields.values()]
    payload = {}
    parts = tf.split(words, sizes, axis=-1)
    for (name, field), part in zip(fields.items(), parts, strict=True):
        if field.base is not None:
            payload[name] = unpack_codes(part, field.base, field.count)
            continue
        values = tf.bitcast(part, field.dtype)
        if values.shape.rank > part.shape.rank:
            values = tf.reshape(values, [*part.shape[:-1], -1])[..., : field.count]
        payload[name] = values
    return payload
