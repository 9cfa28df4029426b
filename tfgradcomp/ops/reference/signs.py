"""Signs of one bit: packed, averaged, voted on, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.blocks import mean_magnitude, spread, sum_of_magnitudes
from tfgradcomp.ops.reference.codes import pack_codes, unpack_codes
from tfgradcomp.ops.reference.random_numbers import coins
from tfgradcomp.ops.reference.vectors import (
    add,
    count_nonfinite,
    length,
    mean_of_workers,
)


def pack_signs(x: Vector, stream: tf.Tensor | None = None) -> tf.Tensor:
    """Packs the signs of float32 `[count]` into base-2 words, code 1 for plus.

    Args:
        x: The vector. A NaN has the sign of its sign bit.
        stream: Its `coins` are the codes of exact zeros, +0 and -0. None: zeros count
            as plus.
    """
    return pack_signs_checked(x, stream)[0]


def pack_signs_checked(x: Vector, stream: tf.Tensor | None = None):
    """Packs signs as `pack_signs` does, and counts the elements that are not finite.

    Returns:
        The words and the number of elements of `x` that are infinite or NaN (int64).
    """
    x = tf.convert_to_tensor(x)
    # By their bits: a processor may take denormals for zeros.
    bits = tf.bitcast(x, tf.int32)
    zero = tf.equal(bits & 0x7FFFFFFF, 0)
    codes = tf.cast(bits >= 0, tf.int32)
    at_zero = 1 if stream is None else coins(stream, length(x))
    return pack_codes(tf.where(zero, at_zero, codes), 2), count_nonfinite(x)


def pack_momentum_signs(
    x: Vector,
    momentum: tf.Tensor,
    beta: float,
    warming_up: tf.Tensor | bool,
    stream: tf.Tensor,
):
    """Packs the signs of the moving average m = beta m + (1 - beta) x.

    Args:
        momentum: m.
        warming_up: Boolean scalar: whether the signs of `x` are packed instead.
        stream: As in `pack_signs`.

    Returns:
        The words, the new m and the number of its elements that are infinite or NaN
        (int64). They include all such elements of x.
    """
    x = tf.convert_to_tensor(x)
    m = beta * momentum + (1 - beta) * x
    words = pack_signs(tf.where(warming_up, x, m), stream)
    return words, m, count_nonfinite(m)


def mean_of_signs(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Vector:
    """Returns the mean of N vectors of scaled signs, added in the order of workers.

    The codes are of base 2; `scale` is float32 `[N, num_blocks]`.
    """

    def decode(signs, scale):
        magnitude = spread(scale, row_splits)
        is_plus = unpack_codes(signs, 2, row_splits[-1]) > 0
        return tf.where(is_plus, magnitude, -magnitude)

    return mean_of_workers(decode, [words, scale], sizes)


def majority_vote(
    words: tf.Tensor,
    count: int,
    base: int,
    reply_base: int,
    quorum: int = 0,
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """Takes a majority vote over the signs of N workers.

    Args:
        count: Number of codes of a worker.
        base: 2: code 1 for plus. 3: codes 0, 1, 2 for minus, an abstention, plus.
        reply_base: 3: codes 0, 1, 2 for minus, no change, plus. 2: code 1 for plus; a
            split vote counts as minus.
        quorum: With base-3 replies, fewer net votes than this count as no change.
        stream: Its `coins` decide split votes, 1 for plus.

    Returns:
        The words of the reply.
    """
    num_workers = words.shape[0]
    total = tf.reduce_sum(unpack_codes(words, base, count), axis=0)
    net = 2 * total - num_workers if base == 2 else total - num_workers
    votes = tf.sign(net)
    if stream is not None:
        votes = tf.where(tf.equal(net, 0), 2 * coins(stream, count) - 1, votes)
    if reply_base == 2:
        return pack_codes((votes + 1) // 2, 2)
    return pack_codes(tf.where(tf.abs(net) < quorum, 0, votes) + 1, 3)


def sign_error_feedback(
    x: Vector,
    momentum: tf.Tensor | None,
    residual: tf.Tensor,
    mu: float,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """Error feedback with scaled signs: p = mu m' + x + ratio e, m' = mu m + x.

    Args:
        momentum: m, or None: p = x + ratio e.
        residual: e.
        ratio: float32 scalar.
        moving: Boolean scalar. If it is false, the residual stays.

    Returns:
        The base-2 words of the signs of p (a zero counts as plus), the mean |p| of
        each block (float32 `[num_blocks]`), the new m (or None) and the new residual.
    """
    x = p = tf.convert_to_tensor(x)
    if momentum is not None:
        momentum = mu * momentum + x
        p = mu * momentum + x
    p = add(p, ratio * residual)
    scale = mean_magnitude(p, row_splits)
    words = pack_signs(p)
    left = p - mean_of_signs(words[tf.newaxis], scale[tf.newaxis], row_splits)
    return words, scale, momentum, tf.where(moving, left, residual)


def mean_sign_error_feedback(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """Error feedback, as `sign_error_feedback`, of the mean of N workers' signs.

    Returns:
        The words, the scale and the new residual.
    """
    x = mean_of_signs(sent_words, sent_scale, row_splits)
    words, scale, _, left = sign_error_feedback(
        x, None, residual, 0.0, ratio, moving, row_splits
    )
    return words, scale, left


def mean_sign_sums(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    row_splits: Sequence[int],
):
    """First half of `mean_sign_error_feedback`, before the scale is known.

    A server that holds a part of the vector knows a block's scale, the mean |p|, only
    after the sums of the block's parts have been added.

    Returns:
        The words of the signs of p and the sum of |p| of each block, float64
        `[num_blocks]`.
    """
    p = add(mean_of_signs(sent_words, sent_scale, row_splits), ratio * residual)
    return pack_signs(p), sum_of_magnitudes(p, row_splits)


def mean_sign_residual(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
) -> tf.Tensor:
    """Second half of `mean_sign_error_feedback`: the new residual.

    That is p less the scaled signs, or the residual as it was unless `moving`. `words`
    are those that the first half returned; `scale` is the mean |p| of each block,
    float32 `[num_blocks]`. The other arguments are those of the first half.
    """
    p = add(mean_of_signs(sent_words, sent_scale, row_splits), ratio * residual)
    left = p - mean_of_signs(words[tf.newaxis], scale[tf.newaxis], row_splits)
    return tf.where(moving, left, residual)
