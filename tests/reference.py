"""The methods in NumPy, written from the papers; nothing here uses the package."""

import math

import numpy as np


def philox_4x32_10(counters, key):
    """Salmon et al. 2011: rows of four 32-bit counters, a 64-bit key."""
    c = [counters[:, lane].astype(np.uint64) for lane in range(4)]
    low, high = key & 0xFFFFFFFF, key >> 32
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first = np.uint64(0xD2511F53) * c[0]
        second = np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> half) ^ c[1] ^ np.uint64(low),
            second & mask,
            (first >> half) ^ c[3] ^ np.uint64(high),
            first & mask,
        ]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return np.stack(c, 1).astype(np.uint32)


def stream_bits(count, key, high, first=0):
    """The first words of a stream: lane j % 4 of block first + j // 4."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64) + np.uint64(first)
    counters = np.zeros([len(blocks), 4], np.uint32)
    counters[:, 0] = blocks & np.uint64(0xFFFFFFFF)
    counters[:, 1] = blocks >> np.uint64(32)
    counters[:, 2], counters[:, 3] = high & 0xFFFFFFFF, high >> 32
    return philox_4x32_10(counters, key).reshape(-1)[:count]


def random_bits(count, seed, step, rank=None, stream=0):
    """Words that a worker draws in a step; a rank of None draws the shared ones."""
    worker = 0 if rank is None else rank + 1
    return stream_bits(count, seed, step * 2**24 + worker * 2**4 + stream)


def uniform(count, seed, step, rank):
    return (random_bits(count, seed, step, rank) >> np.uint32(8)) * 2.0**-24


def digits_per_word(base):
    return max(k for k in range(1, 33) if base**k <= 2**32)


def pack(codes, base):
    """Element j is digit j mod k of word j // k, least significant first."""
    digits = digits_per_word(base)
    words = [0] * math.ceil(len(codes) / digits)
    for j, code in enumerate(codes):
        words[j // digits] += int(code) * base ** (j % digits)
    return np.array(words, np.uint64).astype(np.uint32).view(np.int32)


def unpack(words, base, count):
    digits = digits_per_word(base)
    words = np.asarray(words).view(np.uint32).tolist()
    return [words[j // digits] // base ** (j % digits) % base for j in range(count)]


def blocks(splits):
    return [slice(a, b) for a, b in zip(splits[:-1], splits[1:], strict=True)]


def clip(x, splits, factor=2.5):
    """Block-wise at c sigma; sigma is the root mean square where the mean outweighs."""
    result = np.array(x, np.float64)
    for block in blocks(splits):
        v = result[block]
        if len(v) == 1:
            continue
        sigma = v.std()
        if abs(v.mean()) > sigma:
            sigma = math.sqrt(np.mean(v**2))
        result[block] = np.clip(v, -factor * sigma, factor * sigma)
    return result


def largest(x, splits):
    return np.array([np.abs(x[block]).max() for block in blocks(splits)])


def spread(scale, splits):
    return np.repeat(scale, np.diff(splits))


def ternary_codes(x, scale, splits, seed, step, rank):
    """sign(x) b with P(b = 1) = |x| / s, in -1, 0, 1."""
    s = spread(scale, splits)
    probability = np.divide(np.abs(x), s, out=np.zeros(len(x)), where=s > 0)
    coins = uniform(len(x), seed, step, rank)
    # float32 may see it the other way; take another seed.
    close = (np.abs(coins - probability) < 1.5e-7) & (0 < coins) & (probability > 0)
    if close.any():
        raise ArithmeticError("A coin is too close to call.")
    return np.sign(x) * (coins < probability)


def shared_coin(count, seed, step, stream):
    return 2.0 * (random_bits(count, seed, step, None, stream) % 2) - 1


def sign(x, seed, step):
    """sign(x); zeros get a pseudo-random sign that all workers share."""
    return np.where(x == 0, shared_coin(len(x), seed, step, 1), np.sign(x))


def vote(signs, tie, seed, step):
    """sign of the sum over the rows; ties are zero or a shared coin."""
    votes = np.sign(np.sum(signs, 0))
    if tie == "random":
        coin = shared_coin(len(votes), seed, step, 2)
        votes = np.where(votes == 0, coin, votes)
    return votes


def scaled_sign(x, splits):
    """(||x_b||_1 / d_b) sign(x_b), the sign of a zero being plus."""
    scale = np.array([np.mean(np.abs(x[block])) for block in blocks(splits)])
    return spread(scale, splits) * np.where(x >= 0, 1.0, -1.0)


def top_k(x, ratio):
    count = max(1, math.ceil(ratio * len(x)))
    kept = np.argsort(-np.abs(x), kind="stable")[:count]
    result = np.zeros(len(x))
    result[kept] = x[kept]
    return result


class DistEF:
    """Algorithms 2 to 4 of Zheng et al. 2019, Appendix A included; one vector."""

    def __init__(self, compress, workers, size, momentum=None, decay=0.0):
        self.compress = compress
        self.momentum = momentum
        self.decay = decay
        self.m = np.zeros([workers, size])
        self.e = np.zeros([workers, size])
        self.server_e = np.zeros(size)
        self.decay_m = np.zeros(size)
        self.unit = 0.0

    def update(self, gradients, weights, rate):
        """What is subtracted from the weights, times the rate."""
        sent, ratio = gradients, self.unit / rate if rate else 0.0
        if self.momentum is not None:
            self.m = self.momentum * self.m + gradients
            sent = self.momentum * self.m + gradients
        p = sent + ratio * self.e
        pushed = np.stack([self.compress(row) for row in p])
        server_p = pushed.mean(0) + ratio * self.server_e
        reply = self.compress(server_p)
        if rate:
            # Residuals are owed in units of the last rate that moved anything.
            self.e, self.server_e, self.unit = p - pushed, server_p - reply, rate
        decay = self.decay * weights
        if self.momentum:
            self.decay_m = self.momentum * self.decay_m + decay
            decay = self.momentum * self.decay_m + decay
        return reply + decay


# Quantizers: the levels of one block in ascending order, and rounding to them.


def optimal_levels(v, count, sweeps=0):
    """ORQ: the ends, middles of middles, then `sweeps` of moves between neighbours."""
    v = np.sort(np.asarray(v, np.float64))
    ranks = [0] * (count - 1) + [len(v) - 1]

    def middle(left, right):
        low, high = v[left], v[right]
        if low == high:
            return right
        m = np.sum(v[left : right + 1] - low) / (high - low)
        return right + 1 - max(math.ceil(m - 1e-9), 1)

    step = count - 1
    while step > 1:
        for left in range(0, count - 1, step):
            ranks[left + step // 2] = middle(ranks[left], ranks[left + step])
        step //= 2
    for _ in range(sweeps):
        for k in range(1, count - 1):
            ranks[k] = middle(ranks[k - 1], ranks[k + 1])
    return v[ranks]


def quantile_levels(v, count):
    """Linear: rank k (n - 1) / (count - 1), halves upwards."""
    places = np.arange(count) * (len(v) - 1) / (count - 1)
    return np.sort(v)[np.floor(places + 0.5).astype(int)]


def even_levels(v, count, norm="max"):
    """QSGD: evenly spaced from -||v|| to ||v||."""
    v = np.asarray(v, np.float64)
    size = np.abs(v).max() if norm == "max" else math.sqrt(np.sum(v**2))
    return size * np.linspace(-1, 1, count)


def symmetric_levels(v):
    """BinGrad-pb: n b = sum of the |v| >= b, as nearly as an element comes to it."""
    a = np.sort(np.abs(np.asarray(v, np.float64)))
    distance = [abs(len(a) * b - a[a >= b].sum()) for b in a]
    b = a[np.argmin(distance)]
    return np.array([-b, b])


def mean_levels(v):
    """BinGrad-b: the means of the two sides of the mean."""
    v = np.asarray(v, np.float64)
    below = v < v.mean()
    sides = [v[below], v[~below]]
    return np.array([side.mean() if len(side) else v.mean() for side in sides])


def rounded_at_random(v, levels, coins):
    """Up with probability (v - b_{k-1}) / (b_k - b_{k-1}); outside, the nearest end."""
    k = np.searchsorted(levels[1:-1], v, side="right")
    low, high = levels[k], levels[k + 1]
    width = np.where(high > low, high - low, 1)
    probability = (v - low) / width
    # float32 may see it the other way; take another seed.
    inside = (probability > 0) & (probability < 1)
    if (inside & (np.abs(coins - probability) < 5e-7)).any():
        raise ArithmeticError("A coin is too close to call.")
    return np.where(coins < probability, high, low)


def rounding_error(v, levels):
    """What is expected of the square of the error, summed over the block (Eq. 9)."""
    v, levels = np.asarray(v, np.float64), np.asarray(levels, np.float64)
    k = np.searchsorted(levels[1:-1], v, side="right")
    return np.sum((v - levels[k]) * (levels[k + 1] - v))


def quantize(x, splits, levels_of, coins):
    """Rounds each block to its own levels."""
    result = np.array(x, np.float64)
    for block in blocks(splits):
        v = result[block]
        result[block] = rounded_at_random(v, levels_of(v), coins[block])
    return result


def bingrad_b(x, splits):
    """Each element becomes the mean of its side."""
    result = np.array(x, np.float64)
    for block in blocks(splits):
        v = result[block]
        low, high = mean_levels(v)
        result[block] = np.where(v < v.mean(), low, high)
    return result


class Quantized:
    """The mean of what workers quantized, with or without residuals; one vector.

    compress: Function of a vector, the step and the rank; -1 is the server.
    """

    def __init__(self, compress, requantizes=False, feeds_back=False):
        self.compress, self.requantizes = compress, requantizes
        self.feeds_back = feeds_back
        self.e = self.server_e = self.unit = 0.0

    def __call__(self, step, gradients, weights, rate):
        ratio = self.unit / rate if rate and self.feeds_back else 0.0
        p = gradients + ratio * self.e
        pushed = np.stack([self.compress(v, step, i) for i, v in enumerate(p)])
        server_p = reply = pushed.mean(0) + ratio * self.server_e
        if self.requantizes:
            reply = self.compress(server_p, step, -1)
        if rate:
            self.e, self.server_e, self.unit = p - pushed, server_p - reply, rate
        return reply


# The operations on flat float32 vectors, from custom_ops/word_format.h and kernels.h.
# float32 in the order written, so that equality means every bit. A stream is a triple
# (key, high, first).


def coins(count, stream):
    return (stream_bits(count, *stream) & np.uint32(1)).astype(np.int64)


def sign_codes(x, stream=None):
    """1 for plus; a zero is plus or, given a stream, a coin. NaN has its sign bit."""
    bits = x.view(np.uint32)
    codes = np.where(bits >> np.uint32(31), 0, 1)
    at_zero = 1 if stream is None else coins(len(x), stream)
    return np.where(bits & np.uint32(0x7FFFFFFF) == 0, at_zero, codes)


def pack_signs(x, stream=None):
    return pack(sign_codes(x, stream), 2)


def pack_momentum_signs(x, momentum, beta, warming_up, stream):
    m = np.float32(beta) * momentum + np.float32(1 - beta) * x
    return pack_signs(x if warming_up else m, stream), m


def pack_ternary(x, limit, scale, splits, stream):
    """sign(x) kept where u s < min(|x|, limit), u the top 24 bits of the words."""
    u = (stream_bits(len(x), *stream) >> np.uint32(8)).astype(np.float32)
    u *= np.float32(2.0**-24)
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
        votes = np.where(net == 0, 2 * coins(count, stream) - 1, votes)
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


def pack_over_threshold(x, moments, residual, variance, threshold, alpha, decay):
    """sign(r) t is sent where |r| > t; v loses what r^2 would, had r been that term."""
    t, zero = np.float32(threshold), np.float32(0)
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
