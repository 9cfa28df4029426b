"""The random numbers that the elements of a vector draw from a stream.

A stream is int64 `[key, high, first]`. Its numbers are those of Philox-4x32-10 (Salmon
et al., Parallel random numbers: as easy as 1, 2, 3, 2011), in blocks of four 32-bit
words. Block B has the key `key` and the counter whose low 64 bits are B, modulo 2^64,
and whose high 64 bits are `high`. With o = 128 * `first`, element j draws, by the
function of this name:

- `random_bits`: 32 bits, part o + j of the blocks from 0 on;
- `uniform`: n / 2^24, where the upper 8 bits of n are part o + j of the blocks from 0
  on and the lower 16 bits are part o + j of the blocks from 2^63 on;
- `coins`: 1 bit, part o + j of the blocks from 0 on.

Parts of k bits are counted from the lowest bits of a block's first word. So a piece of
a vector that begins at element o, a multiple of `DRAWN_TOGETHER` = 128, draws the
vector's numbers if its `first` is larger by o / 128.

The upper 8 bits of a uniform number decide most comparisons. The native ops draw the
lower bits only for the others, once in 256, and so need a quarter of the blocks. The
reference draws all bits, with the same result.
"""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.core.context import DRAWN_TOGETHER

_LOWER = -(2**63)  # Where the blocks of the lower bits begin, as int64.


def random_bits(stream: tf.Tensor, count: int) -> tf.Tensor:
    """Returns 32 random bits an element, uint32 `[count]`."""
    return _words(stream, 4, count)[:count]


def uniform(stream: tf.Tensor, count: int) -> tf.Tensor:
    """Returns random numbers in [0, 1), multiples of 2^-24, float32 `[count]`."""
    upper = tf.bitcast(_words(stream, 16, count), tf.uint8)
    lower = tf.bitcast(_words(stream, 8, count, _LOWER), tf.uint16)
    upper, lower = (tf.reshape(parts, [-1])[:count] for parts in (upper, lower))
    # Each of these operations is exact.
    return tf.cast(upper, tf.float32) * 2.0**-8 + tf.cast(lower, tf.float32) * 2.0**-24


def coins(stream: tf.Tensor, count: int) -> tf.Tensor:
    """Returns random bits, int32 `[count]` of 0 and 1."""
    words = _words(stream, DRAWN_TOGETHER, count)[:, tf.newaxis]
    bits = tf.bitwise.right_shift(words, tf.cast(tf.range(32), tf.uint32)) & 1
    return tf.cast(tf.reshape(bits, [-1])[:count], tf.int32)


def _words(stream, per_block, count, begin=0):
    """Returns the words of blocks, each of which has parts for `per_block` elements."""
    stream = tf.convert_to_tensor(stream, tf.int64)
    first = stream[2] * (DRAWN_TOGETHER // per_block) + begin
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4 * -(-count // per_block)],
        key=tf.bitcast(stream[:1], tf.uint64),
        counter=tf.bitcast(tf.stack([first, stream[1]]), tf.uint64),
        alg=1,
        dtype=tf.uint32,
    )
