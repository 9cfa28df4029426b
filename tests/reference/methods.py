"""The methods in NumPy, written from the papers; nothing here uses the package."""

import math
import statistics
from fractions import Fraction

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


def drawn_blocks(key, high, start, count):
    """Blocks of four words whose counters have the low 64 bits start, start + 1, ..."""
    low = np.uint64(start % 2**64) + np.arange(count, dtype=np.uint64)
    counters = np.zeros([count, 4], np.uint32)
    counters[:, 0] = low & np.uint64(0xFFFFFFFF)
    counters[:, 1] = low >> np.uint64(32)
    counters[:, 2], counters[:, 3] = high & 0xFFFFFFFF, high >> 32
    return philox_4x32_10(counters, key)


def drawn_parts(count, bits, key, high, first, begin=0):
    """Parts of so many bits, least significant first, from 128 * first parts on."""
    each = 128 // bits
    blocks = drawn_blocks(key, high, begin + 128 * first // each, -(-count // each))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = blocks[:, :, np.newaxis] >> shifts & np.uint32(2**bits - 1)
    return parts.reshape(-1)[:count]


def stream_bits(count, key, high, first=0):
    """Words: 32 bits an element."""
    return drawn_parts(count, 32, key, high, first)


def stream_uniform(count, key, high, first=0):
    """Multiples of 2^-24: 8 bits an element, and 16 from the blocks from 2^63 on."""
    upper = drawn_parts(count, 8, key, high, first)
    lower = drawn_parts(count, 16, key, high, first, 2**63)
    return (upper * 2.0**16 + lower) * 2.0**-24


def stream_coins(count, key, high, first=0):
    """1 bit an element."""
    return drawn_parts(count, 1, key, high, first).astype(np.int64)


def stream_of(seed, step, rank=None, stream=0):
    """What a worker draws from in a step; a rank of None draws what all share."""
    worker = 0 if rank is None else rank + 1
    return seed, step * 2**24 + worker * 2**4 + stream


def random_bits(count, seed, step, rank=None, stream=0):
    return stream_bits(count, *stream_of(seed, step, rank, stream))


def uniform(count, seed, step, rank, offset=0):
    """Numbers in [0, 1) of the elements from `offset` on."""
    return stream_uniform(offset + count, *stream_of(seed, step, rank))[offset:]


def normal(count, key, high):
    """The sum of two quantiles over sqrt 2, by the halves of a random word."""
    words = stream_bits(count, key, high).astype(np.int64)
    halves = (np.concatenate([words % 2**16, words // 2**16]) + 0.5) / 2**16
    quantile = statistics.NormalDist().inv_cdf
    low, high = np.split(np.array([quantile(half) for half in halves]), 2)
    return (low + high) / np.sqrt(2)


def half(values, dtype):
    """Values rounded to float16 or bfloat16."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    words += 0x7FFF + (words >> np.uint64(16) & np.uint64(1))
    words &= np.uint64(0xFFFF0000)
    return words.astype(np.uint32).view(np.float32).astype(np.float64)


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


def ternary_codes(x, scale, splits, seed, step, rank, offset=0):
    """sign(x) b with P(b = 1) = |x| / s, in -1, 0, 1."""
    s = spread(scale, splits)
    probability = np.divide(np.abs(x), s, out=np.zeros(len(x)), where=s > 0)
    coins = uniform(len(x), seed, step, rank, offset)
    # float32 may see it the other way; take another seed.
    close = (np.abs(coins - probability) < 1.5e-7) & (0 < coins) & (probability > 0)
    if close.any():
        raise ArithmeticError("A coin is too close to call.")
    return np.sign(x) * (coins < probability)


def shared_coin(count, seed, step, stream):
    return 2.0 * stream_coins(count, *stream_of(seed, step, None, stream)) - 1


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


# Half of the best levels for a standard normal law (Max 1960, Table I).
NORMAL_LEVELS = {
    1: [0.79788456],
    2: [0.45278003, 1.51041761],
    3: [0.24509418, 0.75600528, 1.34390928, 2.1519457],
    4: [
        *(0.12839503, 0.3880483, 0.65675912, 0.94234046),
        *(1.2562312, 1.61804639, 2.06901723, 2.73258957),
    ],
}


def scalar_codebook(x, splits, bits):
    """The nearest level, where the mean magnitude of a block is that of the law."""
    levels = np.array(NORMAL_LEVELS[bits])
    result = np.array(x, np.float64)
    for block in blocks(splits):
        v = result[block]
        scaled = levels * np.mean(np.abs(v)) * math.sqrt(math.pi / 2)
        nearest = np.abs(np.abs(v)[:, np.newaxis] - scaled).argmin(1)
        result[block] = np.where(v >= 0, 1, -1) * scaled[nearest]
    return result


def kept_by_codebook(bits):
    """Of ||v||_1^2 / d, by the level that is nearest to the mean magnitude."""
    mean = math.sqrt(2 / math.pi)
    nearest = min(NORMAL_LEVELS[bits], key=lambda level: abs(level - mean))
    return 1 - (1 - nearest / mean) ** 2


def top_k(x, ratio):
    count = max(1, math.ceil(ratio * len(x)))
    kept = np.argsort(-np.abs(x), kind="stable")[:count]
    result = np.zeros(len(x))
    result[kept] = x[kept]
    return result


def cut(splits, most):
    """Splits with longer blocks cut."""
    ends = [range(a, b, most) for a, b in zip(splits[:-1], splits[1:], strict=True)]
    return [*(edge for part in ends for edge in part), splits[-1]]


def largest_of_chunks(x, splits, k, chunk):
    """Indices of the largest elements of each chunk, the first of equal ones."""
    for block in blocks(cut(splits, chunk)):
        v = np.abs(x[block])
        count = math.ceil(Fraction(k * len(v), chunk))
        yield block.start + np.sort(np.argsort(-v, kind="stable")[:count])


def split_at_means(q, bits):
    """Levels of integers: parts at their mean, with 3 bits again; and means."""
    code, means = np.zeros(len(q), int), [Fraction(sum(q), len(q))]
    for _ in range(1, bits):
        code = 2 * code + [e >= means[c] for e, c in zip(q, code, strict=True)]
        parts = [
            [e for e, c in zip(q, code, strict=True) if c == part]
            for part in range(2 * len(means))
        ]
        means = [
            Fraction(sum(part), len(part)) if part else means[i // 2]
            for i, part in enumerate(parts)
        ]
    return code, means


def chunked_top_k(x, splits, k, chunk, bits):
    """The largest of each chunk, each the mean of its part of the magnitudes."""
    x, result = np.asarray(x, np.float32), np.zeros(len(x))
    for sent in largest_of_chunks(x, splits, k, chunk):
        q, unit = fixed(np.abs(x[sent]))
        code, means = split_at_means(q, bits)
        levels = half(np.array([float(mean * unit) for mean in means]), "bfloat16")
        result[sent] = np.where(np.signbit(x[sent]), -1, 1) * levels[code]
    return result


def drawn(size, ratio, seed, step):
    """Sizes of the ranges at the elements that random-k draws of them; else 0."""
    count = max(1, math.ceil(ratio * size))
    result = np.zeros(size)
    for s, word in enumerate(random_bits(count, seed, step, None, 7).tolist()):
        begin, end = s * size // count, (s + 1) * size // count
        result[begin + (end - begin) * word // 2**32] = end - begin
    return result


def clip_norm(x, most):
    """Shortens a vector to a norm, as float32."""
    norm = max(np.linalg.norm(np.asarray(x, np.float64)), most)
    return x * np.float32(most / norm)


# Quantizers: the levels of one block in ascending order, and rounding to them.


def fixed(v):
    """The integers that stand for a block's elements, and their unit."""
    exponent = math.frexp(max(abs(float(e)) for e in v))[1]
    unit = Fraction(2) ** (exponent - 30)
    tiny = 2.0**-126
    return [round(Fraction(float(e)) / unit) * (abs(e) >= tiny) for e in v], unit


def optimal_levels(v, count, sweeps=0):
    """ORQ: the ends, middles of middles, then `sweeps` of moves between neighbours."""
    v = np.sort(v)
    q, _ = fixed(v)
    ranks = [0] * (count - 1) + [len(v) - 1]

    def middle(left, right):
        width = max(q[right] - q[left], 1)
        total = sum(e - q[left] for e in q[left : right + 1])
        return right + 1 - max(math.ceil(Fraction(total, width)), 1)

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
    ranks = [Fraction(k * (len(v) - 1), count - 1) for k in range(count)]
    return np.sort(v)[[math.floor(rank + Fraction(1, 2)) for rank in ranks]]


def even_levels(v, count, norm="max"):
    """QSGD: evenly spaced from -||v|| to ||v||."""
    v = np.asarray(v, np.float64)
    size = np.abs(v).max() if norm == "max" else math.sqrt(np.sum(v**2))
    return size * np.linspace(-1, 1, count)


def symmetric_levels(v):
    """BinGrad-pb: n b = sum of the |v| >= b, as nearly as an element comes to it."""
    a = np.sort(np.abs(v))
    q, _ = fixed(a)
    sums = [sum(q[np.searchsorted(a, b) :]) for b in a]
    distances = [abs(len(a) * e - s) for e, s in zip(q, sums, strict=True)]
    b = a[distances.index(min(distances))]
    return np.array([-b, b])


def powers_of_two(v):
    """Natural compression: 127 powers of either sign, and 0."""
    top = np.floor(np.log2(np.abs(v).max())) + 1 if v.any() else -np.inf
    powers = 2.0 ** (top - np.arange(127))
    return np.concatenate([-powers, [0], powers[::-1]])


def float16_levels(levels):
    """Rounds the ends of a block's levels outward, and the others to nearest."""
    down, up = np.float16([-np.inf, np.inf])
    table = levels.astype(np.float16)
    table[0] = np.nextafter(table[0], down) if table[0] > levels[0] else table[0]
    table[-1] = np.nextafter(table[-1], up) if table[-1] < levels[-1] else table[-1]
    return table.astype(np.float64)


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


def bingrad_b(x, splits, lloyd_steps=0):
    """Each element becomes the mean of its side; Lloyd steps move the border."""
    result = np.array(x, np.float64)
    for block in blocks(splits):
        v = result[block]
        edge, (low, high) = v.mean(), mean_levels(v)
        for _ in range(lloyd_steps if low < high else 0):
            edge = (low + high) / 2
            low, high = v[v < edge].mean(), v[v >= edge].mean()
        result[block] = np.where(v < edge, low, high)
    return result


def fitted(decoded, v, splits):
    """Each block times <decoded, v> / ||decoded||^2, the least squares fit of v."""
    result = np.array(decoded, np.float64)
    for block in blocks(splits):
        y = result[block]
        square = np.sum(y * y)
        result[block] = y * (np.sum(y * v[block]) / square if square else 1)
    return result
