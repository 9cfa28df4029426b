"""The operations on flat float32 vectors in NumPy.

They follow custom_ops/word_format.h and kernels.h: float32 in the order written, so
that equality means every bit. A stream is a triple (key, high, first).
"""

import math

import numpy as np

from tests.reference.methods import (
    blocks,
    pack,
    spread,
    stream_coins,
    stream_uniform,
    unpack,
)


def sign_codes(x, stream=None):
    """1 for plus; a zero is plus or, given a stream, a coin. NaN has its sign bit."""
    bits = x.view(np.uint32)
    codes = np.where(bits >> np.uint32(31), 0, 1)
    at_zero = 1 if stream is None else stream_coins(len(x), *stream)
    return np.where(bits & np.uint32(0x7FFFFFFF) == 0, at_zero, codes)


def pack_signs(x, stream=None):
    return pack(sign_codes(x, stream), 2)


def pack_momentum_signs(x, momentum, beta, warming_up, stream):
    m = np.float32(beta) * momentum + np.float32(1 - beta) * x
    return pack_signs(x if warming_up else m, stream), m


def pack_ternary(x, limit, scale, splits, stream):
    """sign(x) kept where u s < min(|x|, limit), u the uniform numbers."""
    u = stream_uniform(len(x), *stream).astype(np.float32)
    kept = u * spread(scale, splits) < np.fmin(np.abs(x), spread(limit, splits))
    # A NaN has no magnitude to be kept by.
    kept &= ~np.isnan(x)
    return pack(np.where(np.signbit(x), -1, 1) * kept + 1, 3)


def block_sum(values, splits, combine=np.add):
    """The order of a sum: chunks of 512 from the vector's start, each 64 rows of 8.

    Rows in adjacent pairs, lanes by halves, a block's chunks in adjacent pairs; what is
    outside the block counts as 0, a last chunk without partner goes up as it is.
    """
    result = []
    for block in blocks(splits):
        parts = []
        for chunk in range(block.start // 512, (block.stop - 1) // 512 + 1):
            inside = np.zeros(512, values.dtype)
            a, b = max(block.start, 512 * chunk), min(block.stop, 512 * (chunk + 1))
            inside[a - 512 * chunk : b - 512 * chunk] = values[a:b]
            rows = list(inside.reshape(64, 8))
            while len(rows) > 1:
                rows = [combine(*rows[i : i + 2]) for i in range(0, len(rows), 2)]
            lanes = rows[0]
            for half in (4, 2, 1):
                lanes = combine(lanes[:half], lanes[half:])
            parts.append(lanes[0])
        while len(parts) > 1:
            parts = [
                combine(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i]
                for i in range(0, len(parts), 2)
            ]
        result.append(parts[0])
    return np.array(result, values.dtype)


def statistics(x, splits):
    """max |x|, sum |x|, sum x^2, sum x, the number of infinities and NaN, a block."""
    wide = x.astype(np.float64)
    magnitudes = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    maximum = block_sum(magnitudes, splits, np.maximum).view(np.float32)
    return [
        maximum.astype(np.float64),
        block_sum(np.abs(wide), splits),
        block_sum(wide * wide, splits),
        block_sum(wide, splits) + 0.0,
        block_sum((~np.isfinite(x)).astype(np.float64), splits),
    ]


def total_codes(words, base, count):
    return np.sum([unpack(row, base, count) for row in words], axis=0, dtype=np.int64)


def sum_codes(words, base, count, sum_base=None):
    sum_base = sum_base or len(words) * (base - 1) + 1
    return pack(total_codes(words, base, count), sum_base)


def sum_levels(words, scale, splits, base, step, zero):
    levels = step * total_codes(words, base, splits[-1]) - zero
    return spread(scale, splits) * levels.astype(np.float32)


def mean_of_signs(words, scale, splits):
    total = None
    for row, s in zip(words, scale, strict=True):
        plus = np.array(unpack(row, 2, splits[-1]), bool)
        s = spread(s, splits)
        value = np.where(plus, s, -s)
        total = value if total is None else total + value
    return total / np.float32(len(words))


def majority_vote(words, count, base, reply_base, quorum=0, stream=None):
    ballots = np.array([unpack(row, base, count) for row in words], np.int64)
    ballots = 2 * ballots - 1 if base == 2 else ballots - 1
    net = np.sum(ballots, axis=0)
    votes = np.sign(net)
    if stream is not None:
        votes = np.where(net == 0, 2 * stream_coins(count, *stream) - 1, votes)
    if reply_base == 2:
        return pack(votes > 0, 2)
    return pack(np.where(np.abs(net) < quorum, 0, votes) + 1, 3)


def sign_error_feedback(x, momentum, residual, mu, ratio, moving, splits):
    p = x
    if momentum is not None:
        momentum = np.float32(mu) * momentum + x
        p = np.float32(mu) * momentum + x
    p = p + np.float32(ratio) * residual
    total = block_sum(np.abs(p).astype(np.float64), splits)
    scale = (total / np.diff(splits)).astype(np.float32)
    s = spread(scale, splits)
    left = p - np.where(sign_codes(p), s, -s)
    return pack_signs(p), scale, momentum, left if moving else residual


def mean_sign_error_feedback(sent_words, sent_scale, residual, ratio, moving, splits):
    x = mean_of_signs(sent_words, sent_scale, splits)
    words, scale, _, left = sign_error_feedback(
        x, None, residual, 0.0, ratio, moving, splits
    )
    return words, scale, left


# Sparse words. Of each element in turn, in the words of the paper: no tricks with bits.


def sparse_word(index, d, minus):
    return np.array(minus * 2**31 + d * 2**28 + index, np.uint32).view(np.int32)


def not_finite(r, v):
    return sum(
        not (np.isfinite(a) and np.isfinite(b)) for a, b in zip(r, v, strict=True)
    )


def pack_unambiguous(x, moments, residual, variance, alpha, decay, splits):
    """What is sent of |r| is 2^e at most, else the nearer power of two, d = 0 ... 7."""
    r, v = residual + x, variance + moments
    clear = r * r > np.float32(alpha) * v
    new_r, new_v = r.copy(), v * np.float32(decay)
    words, exponents = [], []
    for block in blocks(splits):
        selected = [
            (j, abs(float(r[j])))
            for j in range(block.start, block.stop)
            if clear[j] and 2.0**-126 <= abs(r[j]) < np.inf
        ]
        if not selected:
            exponents.append(-128)
            continue
        e = max(math.frexp(size)[1] - 1 for _, size in selected)
        exponents.append(e)
        for j, size in selected:
            low = math.frexp(size)[1] - 1
            nearer = low if size - 2.0**low < 2.0 ** (low + 1) - size else low + 1
            d = e - min(nearer, e)
            if d <= 7:
                words.append(sparse_word(j, d, r[j] < 0))
                new_r[j] = new_v[j] = 0
    return (
        np.array(words, np.int32),
        np.array(exponents, np.int8),
        new_r,
        new_v,
        not_finite(r, v),
    )


def pack_over_threshold(
    x, moments, residual, variance, threshold, alpha, decay, splits
):
    """sign(r) t is sent where |r| > t; v loses what r^2 would, had r been that term."""
    t, zero = spread(threshold, splits), np.float32(0)
    r = residual + x
    v = np.zeros_like(r) if variance is None else variance + moments
    sent = np.abs(r) > t
    if variance is not None:
        sent &= r * r > np.float32(alpha) * v
    words = [sparse_word(j, 0, r[j] < 0) for j in np.flatnonzero(sent)]
    lower = np.maximum(v - 2 * t * np.abs(r) + t * t, zero)
    new_v = np.where(sent, lower, v) * np.float32(decay)
    new_r = np.where(sent, r - np.copysign(t, r), r)
    nonfinite = not_finite(r, v)
    new_v = None if variance is None else new_v
    return np.array(words, np.int32), new_r, new_v, nonfinite


def mean_of_sparse(words, scale, splits):
    total = np.zeros(splits[-1], np.float32)
    for row, s in zip(words.view(np.uint32).tolist(), scale, strict=True):
        of_block = spread(s, splits)
        for word in row:
            minus, d, index = word >> 31, word >> 28 & 7, word & 2**28 - 1
            if index < len(total):
                value = of_block[index] * np.float32(2.0**-d)
                total[index] += -value if minus else value
    return total / np.float32(len(words))
