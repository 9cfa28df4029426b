r"""Messages of sparse words, with indices as they are or coded as gaps.

A word holds an element's sign (1 bit), d (3 bits) and index (28 bits), from the top; a
word of ones means no element. The words of a message have increasing indices.

`"fixed"`: the message consists of the words.

`"delta"`: a header word, b, and a dense stream of fields of v + b bits, the first at
the low end of the first word. v is the number of value bits: 4 (sign and d) or 1 (the
sign). The lower b bits of a field hold the number of elements since the last one sent,
less than \( 2^b - 1 \). A field of ones skips \( 2^b - 1 \) elements and sends
nothing, so that ones after the end have no effect. b, from 1 to 24, makes the stream as
short as possible; b = 0 means that the words follow as they are, if that is shorter.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfgradcomp.compat.assertions import checked
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.ops import INDEX_BITS, NOTHING

CODINGS = ("fixed", "delta")

_WORD_BITS = 32
_GAP_BITS = np.arange(1, 25)


def encode(words: tf.Tensor, coding: str, value_bits: int) -> tf.Tensor:
    """Returns the message, int32 `[any]`, of words, int32 `[n]`."""
    if coding == "fixed":
        return words
    if in_xla():
        # Sizes are static in XLA.
        return tf.concat([[0], words], 0)
    numbers = _unsigned(words)
    index = numbers & (2**INDEX_BITS - 1)
    gaps = index - tf.concat([[-1], index[:-1]], 0) - 1
    lengths = _stream_words(gaps, value_bits)
    gap_bits = tf.gather(_GAP_BITS, tf.argmin(lengths))
    length = tf.reduce_min(lengths)

    def stream():
        skipped = _ones(gap_bits)
        value = tf.bitwise.right_shift(numbers, _int64(_WORD_BITS - value_bits))
        field = tf.bitwise.left_shift(value, gap_bits) + gaps % skipped
        # A field stands behind all fields that skip elements before it.
        place = tf.range(tf.size(gaps, tf.int64)) + tf.cumsum(gaps // skipped)
        coded = _written(field, place, value_bits + gap_bits, length)
        return tf.concat([[tf.cast(gap_bits, tf.int32)], coded], 0)

    is_shorter = length < tf.size(words, tf.int64)
    return tf.cond(is_shorter, stream, lambda: tf.concat([[0], words], 0))


def decode(messages: tf.Tensor, coding: str, value_bits: int) -> tf.Tensor:
    """Returns words of messages, both int32 `[N, any]` padded with -1.

    Raises:
        tf.errors.InvalidArgumentError: If a delta message has no header.
    """
    if coding == "fixed":
        return messages
    if in_xla():
        return messages[:, 1:]
    gap_bits = _checked(tf.cast(messages[:, :1], tf.int64))
    is_plain = tf.equal(gap_bits, 0)
    width = tf.where(is_plain, _int64(_WORD_BITS), value_bits + gap_bits)
    stream = messages[:, 1:]
    count = tf.size(stream[0], tf.int64) * _WORD_BITS // width
    place = tf.range(tf.reduce_max(count))[tf.newaxis]
    field = _read(stream, place, width)
    sends = (place < count) & tf.less(field, _ones(width))
    gap = field & _ones(gap_bits)
    index = tf.cumsum(gap + tf.cast(sends, tf.int64), axis=1) - 1
    # No sender has such an index, which would reach into the bits of the value.
    sends &= is_plain | (index < 2**INDEX_BITS)
    value = tf.bitwise.right_shift(field, gap_bits)
    word = tf.bitwise.left_shift(value, _int64(_WORD_BITS - value_bits)) + index
    words = _as_words(tf.where(is_plain, field, word))
    words = tf.ragged.boolean_mask(words, sends).to_tensor(NOTHING)
    return tf.ensure_shape(words, [messages.shape[0], None])


def _checked(headers):
    """Returns headers of delta messages, int64 `[N, 1]`, or an error."""
    most = _GAP_BITS[-1]
    fit = tf.reduce_all((headers >= 0) & (headers <= most))
    message = [
        "A delta message must begin with the number of bits of a gap, from 0 to "
        f"{most}. The sender or the network is faulty. Received: headers=",
        headers,
    ]
    return checked(headers, fit & (tf.size(headers) > 0), message)


def _stream_words(gaps, value_bits):
    """Returns the words of the stream for each number of gap bits, int64 `[24]`."""
    count = tf.size(gaps, tf.int64)
    fields = tf.stack([count + tf.reduce_sum(gaps // (2**b - 1)) for b in _GAP_BITS])
    return -(-fields * (value_bits + _GAP_BITS) // _WORD_BITS)


def _written(fields, places, width, length):
    """Returns a stream of `length` words: fields at their places, ones elsewhere."""
    begin = places * width
    zeros = tf.bitwise.left_shift(_ones(width) - fields, begin % _WORD_BITS)
    word = begin // _WORD_BITS
    # Different fields have different bits, so their sum is their union.
    low, high = (
        tf.math.unsorted_segment_sum(part, to, length + 1)[:-1]
        for part, to in (
            (zeros & (2**_WORD_BITS - 1), word),
            (tf.bitwise.right_shift(zeros, _int64(_WORD_BITS)), word + 1),
        )
    )
    return _as_words(2**_WORD_BITS - 1 - low - high)


def _read(stream, places, width):
    """Returns the fields at some places of each row; arbitrary past its end."""
    last = tf.size(stream[0], tf.int64)
    stream = _unsigned(tf.pad(stream, [[0, 0], [0, 2]]))
    begin = places * width
    word = tf.minimum(begin // _WORD_BITS, last)
    low, high = (tf.gather(stream, word + i, batch_dims=1) for i in (0, 1))
    both = low | tf.bitwise.left_shift(high, _int64(_WORD_BITS))
    return tf.bitwise.right_shift(both, begin % _WORD_BITS) & _ones(width)


def _ones(bits):
    return tf.bitwise.left_shift(tf.ones_like(bits), bits) - 1


def _unsigned(words):
    return tf.cast(tf.bitcast(words, tf.uint32), tf.int64)


def _as_words(numbers):
    return tf.bitcast(tf.cast(numbers, tf.uint32), tf.int32)


def _int64(number):
    return tf.constant(number, tf.int64)
