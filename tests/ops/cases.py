"""Test data for the operations: sizes, blocks, numbers, words and calls."""

import numpy as np
import tensorflow as tf

from tfgradcomp.core.word_format import NOTHING
from tfgradcomp.ops.reference.chunks import ChunkFormat

# Formats of chunks: one element, ragged words, all elements, the default.
CHUNKS = tuple(
    ChunkFormat(*form)
    for form in ((1, 1, 1), (5, 24, 3), (7, 100, 1), (40, 40, 3), (64, 4096, 2))
)
SUMS_ASKED = ((), ("l1",), ("sum_of_squares",), ("sum", "sum_of_squares"))
BASES = (2, 3, 5, 7, 9, 17, 33, 129, 256, 257, 65536, 65537, 2**31, 2**32)
# Around the digits of a word, and more than a chunk of a sum.
SIZES = (0, 1, 2, 3, 19, 20, 21, 31, 32, 33, 63, 64, 65, 1000)
WORKERS = (1, 2, 3, 4, 5, 8, 9)
LAYOUTS = ("one", "ragged", "ones", "buckets of 2048", "buckets of 100")
KINDS = ("normal", "zeros", "huge", "tiny")
# Triples (key, high, first), unsigned. Of the second, element 512 is the first whose
# upper bits are in a block whose number has a bit above the lower 32.
STREAMS = ((7, 3, 0), (0xDEADBEEF12345678, 2**40 + 17, 2**29 - 4))
SPECIAL = np.array(
    [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-40, -1e-38]
    + [1.2e-38, -1.2e-38, 1e38, -1e38, 3.4e38, -3.4e38, 1.0, -1.0, 0.5, -3.0],
    np.float32,
)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def row_splits(size, layout):
    """Returns the ends of blocks, none of which is empty."""
    if layout == "one":
        inner = []
    elif layout == "ones":
        inner = range(1, size)
    elif layout == "ragged":
        # Bounds beside and on those of words and chunks, and far from them.
        inner = [1, 2, 20, 31, 33, 40, 63, 511, 512, 513, 514, 1023, 1500, 5000, 70001]
    else:
        inner = range(int(layout.split()[-1]), size, int(layout.split()[-1]))
    return [0, *(i for i in inner if i < size), size] if size else [0]


def layouts(*sizes):
    """Returns pairs of a size and a layout that cuts a vector of this size."""
    return [
        (size, layout)
        for size in sizes
        for layout in LAYOUTS
        if layout == "one" or 1 < size < (6000 if layout == "ones" else size + 1)
    ]


def cuts(size, seed=0):
    """Returns random sizes of parts, mostly near those of groups, words and chunks."""
    rng = np.random.default_rng([seed, size])
    near = [0, 1, 2, 19, 20, 21, 31, 32, 33, 63, 64, 65, 511, 512, 513, 2560]
    sizes, left = [], size
    while left:
        part = int(rng.choice(near) if rng.random() < 0.8 else rng.integers(size))
        sizes.append(min(part, left))
        left -= sizes[-1]
    return [*sizes, 0]


def floats(size, kind="normal", seed=0):
    """Returns float32 `[size]` of a kind."""
    rng = np.random.default_rng([size, seed])
    x = rng.normal(size=size).astype(np.float32)
    if kind == "huge":
        return np.clip(x, -3, 3) * np.float32(1e38)
    if kind == "tiny":
        # Normal numbers, where results may be denormal no less than the inputs.
        return np.copysign(np.maximum(np.abs(x), 0.2), x) * np.float32(1e-36)
    if kind == "zeros":
        return np.where(rng.random(size) < 0.5, np.copysign(np.float32(0), x), x)
    if kind == "special":
        return rng.choice(SPECIAL, size)
    return x


def flushed(x):
    """Returns x with denormals set to zero, as in TensorFlow's arithmetic on a CPU."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def tensor(stream):
    """Returns a stream as the int64 tensor that the operations take."""
    return tf.constant(np.array(stream, np.uint64).view(np.int64))


def codes(base, size, seed=0):
    """Returns random codes as the int32 that have the bits of the uint32 codes."""
    values = np.random.default_rng([seed, base, size]).integers(0, base, size)
    return values.astype(np.uint32).view(np.int32)


def words(base, rows, size, seed=0):
    """Returns packed random codes of each row, int32 `[rows, words]`."""
    digits = max(k for k in range(1, 33) if base**k <= 2**32)
    padded = np.zeros([rows, -(-size // digits) * digits], np.uint64)
    rng = np.random.default_rng([seed, base, rows, size])
    padded[:, :size] = rng.integers(0, base, [rows, size])
    powers = np.array([base**j for j in range(digits)], np.uint64)
    packed = (padded.reshape(rows, -1, digits) * powers).sum(-1)
    return packed.astype(np.uint32).view(np.int32)


def thresholds(row_splits, middle):
    """A threshold of each block, some below and some above `middle`."""
    factors = 0.5 + np.arange(len(row_splits) - 1) % 3 / 2
    return (middle * factors).astype(np.float32)


def sparse_words(rows, size, share=0.3, seed=0):
    """Returns words of a random share of the elements, int32 `[rows, words]`.

    Rows are filled up with words that stand for no element, of two kinds.
    """
    rng = np.random.default_rng([seed, rows, size])
    chosen = [np.flatnonzero(rng.random(size) < share) for _ in range(rows)]
    words = np.full([rows, max(map(len, chosen))], 2**32 - 1, np.uint32)
    words[::2] = size  # An element beyond the end of the vector.
    for row, index in zip(words, chosen, strict=True):
        upper = rng.integers(0, 16, len(index)) << 28
        row[: len(index)] = (index + upper).astype(np.uint32)
    return words.view(np.int32)


def chunks(splits, chunk):
    """Returns the ends of blocks cut into chunks of at most so many elements."""
    ends = zip(splits[:-1], splits[1:], strict=True)
    return [*(i for a, b in ends for i in range(a, b, chunk)), splits[-1]]


def largest_words(rows, splits, form, seed=0):
    """Returns words of random elements of chunks, int32 `[rows, words]`."""
    rng = np.random.default_rng([seed, rows, *form])
    widths = np.diff(splits)[:, np.newaxis]
    places = np.arange(widths.max(initial=0) + 1)
    shape = rows, len(widths), len(places)
    # Of each chunk, the few elements that got the smallest numbers.
    drawn = np.where(places < widths, rng.random(shape), 2)
    counts = rng.integers(np.minimum(form.k, widths) + 1, size=(*shape[:2], 1))
    chosen = drawn < np.take_along_axis(np.sort(drawn), counts, -1)
    row, chunk, place = np.nonzero(chosen)
    number = (np.cumsum(chosen, -1) - 1)[row, chunk, place]
    stream = np.zeros([*shape[:2], 32 * form.words], bool)
    stream[row, chunk, (place >> form.low) + number] = True
    for bit in range(form.low):
        at = form.unary + number * form.low + bit
        stream[row, chunk, at] = place >> bit & 1
    codes = np.arange(form.k * form.bits) < counts * form.bits
    values = codes & (rng.random(codes.shape) < 0.5)
    begin = form.unary + form.k * form.low
    stream[..., begin : begin + values.shape[-1]] = values
    packed = np.packbits(stream.reshape(rows, -1), axis=1, bitorder="little")
    return packed.view(np.int32)


def positive(shape, seed=0):
    """Returns random scales."""
    rng = np.random.default_rng([seed, 99])
    return (rng.random(shape) + 0.1).astype(np.float32)


def matrices(size):
    """Returns the rows and columns of tensors of `size` elements in all.

    The last matrix is large if there is room. Other elements have 0 columns.
    """
    shapes = [(1, 1), (2, 3), (1, 0), (65, 64), (7, 130), (1, 5), (64, 129), (9, 1)]
    shapes += [(0, 0), (3, 1100), (130, 17), (2, 0)]
    chosen = []
    for rows, columns in shapes:
        count = rows * (columns or 1)
        if count <= size:
            chosen.append((rows, columns))
            size -= count
    wide = 527
    if size >= wide:
        chosen.append((size // wide, wide))
    chosen.append((size % wide, 0))
    return [list(axis) for axis in zip(*chosen, strict=True)]


def products(x, rank, kind="normal"):
    """Returns calls of the products of `matrices` and factors of a rank."""
    rows, columns = matrices(x.size)
    is_matrix = np.array(columns) > 0
    left = floats(rank * int(np.sum(rows, where=is_matrix)), kind, 5)
    right = floats(rank * sum(columns), kind, 6)
    counts = np.where(is_matrix, rank * np.array(columns), rows)
    values = floats(counts.sum(), kind, 7)
    y, factor, form = floats(x.size, kind, 11), np.float32(0.7), (rows, columns, rank)
    return [
        ("multiply_matrices", (x, right, *form)),
        ("multiply_sum", (x, y, factor, left, values, right, *form)),
        ("multiply_transposed", (x, left, *form)),
        ("multiply_factors", (left, values, *form)),
        ("subtract_factors", (x, left, values, *form)),
    ]


def pairs(x, workers, count, kind):
    """Returns calls with `count` elements of each worker, some of which are nothing."""
    rng = np.random.default_rng([x.size, count])
    indices = [rng.permutation(x.size)[:count] for _ in range(workers)]
    is_nothing = rng.random([workers, count]) < 0.1
    indices = np.where(is_nothing, NOTHING, indices).astype(np.int32)
    values = floats(workers * count, "zeros" if kind == "special" else kind, 9)
    values = values.reshape(workers, count)
    values[0] = floats(count, kind, 10)
    return [
        ("clear_elements", (x, indices[0])),
        ("mean_of_pairs", (indices, values, x.size)),
        ("mean_of_pairs", (indices[:1], values[:1], x.size)),
    ]


def calls(size, layout="one", workers=3, kind="normal"):
    """Returns calls of every operation: (label, function, arguments).

    Arguments are arrays, row_splits a list, the rest plain numbers.
    """
    splits = row_splits(size, layout)
    blocks = len(splits) - 1
    x = floats(size, kind)
    # One NaN or infinity to a sum: the sign of what several give depends on the order
    # in which an instruction takes them.
    m, e = (floats(size, "zeros" if kind == "special" else kind, i) for i in (1, 2))
    scale, scales = positive(blocks), positive([workers, blocks], 1)
    limit = positive(blocks, 2)
    limit[::2] = np.inf
    if kind == "special" and blocks > 2:
        scale[0], scale[1], scales[-1, 0] = np.inf, np.nan, np.inf
        limit[1] = np.nan
    streams = [np.array(stream, np.uint64).view(np.int64) for stream in STREAMS]
    signs = words(2, workers, size)
    result = [
        ("pack_signs_checked", (x,)),
        ("pack_signs_checked", (x, streams[0])),
        ("add_scaled", (x, e, np.float32(0.7))),
        ("first_nonfinite", (x, np.array(False))),
        ("first_nonfinite", (x, np.array(True))),
        ("round_to_bfloat16", (x, streams[1])),
        ("pack_signs_checked", (x * 0, streams[1])),
        ("pack_momentum_signs", (x, m, 0.9, np.array(False), streams[0])),
        ("pack_momentum_signs", (x, m, 0.99, np.array(True), streams[1])),
        ("pack_ternary", (x, limit, scale, splits, streams[0])),
        (
            "pack_ternary",
            (x, limit * 0 + np.float32(np.inf), scale, splits, streams[1]),
        ),
        ("block_statistics", (x, splits)),
        *(("block_statistics", (x, splits, sums)) for sums in SUMS_ASKED),
        ("mean_of_signs", (signs, scales, splits)),
    ]
    for base in (2, 3, 5, 17, 257):
        ballots = words(base, workers, size)
        zero = workers * (base - 1)
        result += [
            ("sum_codes", (ballots, base, size)),
            ("sum_codes", (ballots[:1], base, size, zero + 1)),
            ("sum_codes", (ballots, base, size, zero + 70)),
            ("sum_levels", (ballots, scale, splits, base, 2, zero)),
            ("sum_levels", (ballots, scale, splits, base, 1, zero // 2)),
            ("sum_levels", (ballots[:1], scale, splits, base, 2, base - 1)),
        ]
    for rule, count, sweeps in (
        ("optimal", 2, 0),
        ("optimal", 9, 0),
        ("optimal", 5, 2),
        ("optimal", 33, 1),
        ("quantiles", 2, 0),
        ("quantiles", 9, 0),
        ("quantiles", 7, 0),
        ("symmetric", 2, 0),
        ("means", 3, 0),
    ):
        # Many equal elements, too, and of such magnitudes that some have no bits left.
        coarse = np.where(np.abs(m) < 1, np.round(m), m * np.abs(m) ** 9)
        for vector in (x, coarse):
            result.append(("find_levels", (vector, splits, rule, count, sweeps)))
    for count in (2, 3, 4, 5, 9, 16, 17, 100):
        table = np.sort(floats(workers * blocks * count, seed=3)) * scale[:1]
        table = table.reshape(workers, blocks, count)
        if blocks:
            table[0, 0] = table[0, 0, 0]  # All of one block the same.
        norms = positive(blocks, seed=4)[:, np.newaxis]
        even = norms * np.linspace(-1, 1, count, dtype=np.float32)
        for levels in (table[-1], even):
            result.append(("pack_levels", (x, levels, splits, streams[0])))
        if count > 2:
            result.append(("pack_levels", (x, table[0], splits)))
        result.append(("mean_of_levels", (words(count, workers, size), table, splits)))
    for base in (2, 3):
        ballots = words(base, workers, size, seed=1)
        for reply_base in (2, 3):
            for quorum, stream in ((0, None), (0, streams[0]), (2, streams[1])):
                result.append(
                    (
                        "majority_vote",
                        (ballots, size, base, reply_base, quorum, stream),
                    )
                )
    for moving in (True, False):
        ratio, flag = np.float32(0.75), np.array(moving)
        result += [
            ("sign_error_feedback", (x, m, e, 0.9, ratio, flag, splits)),
            ("sign_error_feedback", (x, None, e, 0.0, ratio, flag, splits)),
            ("mean_sign_error_feedback", (signs, scales, e, ratio, flag, splits)),
            (
                "mean_sign_residual",
                (signs, scales, e, ratio, flag, signs[-1], scale, splits),
            ),
        ]
    result.append(("mean_sign_sums", (signs, scales, e, ratio, splits)))
    # Some selected, all of them with many too small to be sent, none.
    v, nothing = np.abs(floats(size, "zeros" if kind == "special" else kind, 4)), 0 * e
    high, low = thresholds(splits, 0.8), thresholds(splits, 1e-3)
    result += [
        ("pack_unambiguous", (x, np.abs(m), e, v, 1.5, 0.999, splits)),
        ("pack_unambiguous", (coarse, nothing, nothing, nothing, 1.0, 1.0, splits)),
        ("pack_unambiguous", (x, np.abs(m), e, v, 1e30, 0.0, splits)),
        ("pack_over_threshold", (x, np.abs(m), e, v, high, 1.5, 0.999, splits)),
        ("pack_over_threshold", (coarse, nothing, e, nothing, low, 1.0, 1.0, splits)),
        ("pack_over_threshold", (x, None, e, None, high, 1.0, 1.0, splits)),
    ]
    for share in (0, 0.3, 1):
        sent = sparse_words(workers, size, share)
        result.append(("mean_of_sparse", (sent, scales, splits)))
    # One in a thousand, most of them, all; with many equal ones, and with elements that
    # mislead a sample of lines.
    loud = x * np.where(np.arange(size) % 2048 < 32, 1e6, 1).astype(np.float32)
    for count in (0, size // 1000 + 1, size * 3 // 4, size):
        for vector in (x, coarse, nothing, loud):
            result.append(("find_largest", (vector, min(count, size))))
        result += pairs(x, workers, min(count, size), kind)
    for form in CHUNKS:
        ends = chunks(splits, form.chunk)
        for vector in (x, coarse):
            result.append(("pack_largest", (vector, ends, *form)))
        sent = largest_words(workers, ends, form)
        table = floats(workers * (len(ends) - 1) * form.levels, seed=5)
        table = table.reshape(workers, -1, form.levels)
        result.append(("mean_of_largest", (sent, table, ends, *form)))
    if size:
        for rank in (1, 3, 4):
            result += products(x, rank, kind)
        # One whose columns depend on each other, and one of a column of zeros.
        tall = [1, 70, max(1, size // 3)]
        factors = floats(3 * sum(tall), kind, 8).reshape(-1, 3)
        factors[1:71, 2] = factors[1:71, 0] - factors[1:71, 1]
        factors[71:, 1] = 0
        result.append(("orthonormalize", (factors.ravel(), tall, 3)))
    return [(f"{i}: {name}", name, args) for i, (name, args) in enumerate(result)]


def flat(result):
    """Returns the arrays of a result as NumPy arrays."""
    if not isinstance(result, (tuple, list)):
        result = [result]
    return [None if value is None else np.asarray(value) for value in result]


def same_results(actual, expected, what=""):
    """Asserts equal bits in all arrays of two results."""
    for i, (a, b) in enumerate(zip(flat(actual), flat(expected), strict=True)):
        if b is None:
            assert a is None, what
        else:
            same(a, b, f"{what}, result {i}")


def same(actual, expected, what=""):
    """Asserts equal bits; one NaN is as good as another."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    kind = f"u{actual.dtype.itemsize}"
    equal = actual.view(kind) == expected.view(kind)
    if actual.dtype.kind == "f":
        equal |= np.isnan(actual) & np.isnan(expected)
    wrong = np.flatnonzero(~equal.ravel())
    assert wrong.size == 0, (
        f"{what}: {wrong.size} of {actual.size} differ, first at {wrong[:5]}: "
        f"{actual.ravel()[wrong[:5]]} and not {expected.ravel()[wrong[:5]]}"
    )
