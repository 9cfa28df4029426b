"""Arguments of every operation: some that are right, and some that are wrong."""

import numpy as np
import tensorflow as tf

from tfgradcomp.ops import SplitVector

X, STREAM = np.ones(5, np.float32), np.array([1, 2, 3], np.int64)
ONE, TWO = np.ones(1, np.float32), np.ones(2, np.float32)
WORDS = np.zeros((2, 1), np.int32)

SENT = dict(
    sent_words=WORDS,
    sent_scale=np.ones((2, 2), np.float32),
    residual=X,
    ratio=0.5,
    row_splits=[0, 2, 5],
)
# A matrix and another element.
MATRICES = dict(rows=[2, 1], columns=[2, 0], rank=2)
FACTOR = np.array([1, 2, 3, 5], np.float32)
HALVES = np.array([0.5, 0.25], np.float32)
GATHERED = dict(x=X, moments=X, residual=X, variance=X, alpha=1.5, decay=0.999)
CHUNKS = dict(row_splits=[0, 2, 5], k=2, chunk=4, bits=2)
LONG_WORDS = np.zeros((2, 2), np.int32)
# Valid arguments of each operation.
CALLS = {
    "pack_codes": dict(codes=np.ones(5, np.int32), base=3),
    "unpack_codes": dict(words=WORDS, base=3, count=5),
    "pack_signs": dict(x=X, stream=STREAM),
    "pack_signs_checked": dict(x=X, stream=STREAM),
    "pack_momentum_signs": dict(
        x=X, momentum=X, beta=0.9, warming_up=False, stream=STREAM
    ),
    "pack_ternary": dict(
        x=X, limit=TWO, scale=TWO, row_splits=[0, 2, 5], stream=STREAM
    ),
    "block_statistics": dict(x=X, row_splits=[0, 2, 5], sums=["sum", "l1"]),
    "sum_codes": dict(words=WORDS, base=3, count=5, sum_base=7),
    "sum_levels": dict(
        words=WORDS, scale=TWO, row_splits=[0, 2, 5], base=3, step=1, zero=2
    ),
    "mean_of_signs": dict(
        words=WORDS, scale=np.ones((2, 2), np.float32), row_splits=[0, 2, 5]
    ),
    "find_levels": dict(x=X, row_splits=[0, 2, 5], rule="optimal", count=5, sweeps=1),
    "pack_levels": dict(
        x=X,
        levels=np.ones((2, 3), np.float32),
        row_splits=[0, 2, 5],
        stream=STREAM,
    ),
    "mean_of_levels": dict(
        words=WORDS, levels=np.ones((2, 2, 3), np.float32), row_splits=[0, 2, 5]
    ),
    "majority_vote": dict(words=WORDS, count=5, base=3, reply_base=2, stream=STREAM),
    "sign_error_feedback": dict(
        x=X,
        momentum=X,
        residual=X,
        mu=0.9,
        ratio=0.5,
        moving=True,
        row_splits=[0, 2, 5],
    ),
    "mean_sign_error_feedback": dict(SENT, moving=True),
    "mean_sign_sums": SENT,
    "mean_sign_residual": dict(SENT, moving=True, words=WORDS[0], scale=TWO),
    "pack_unambiguous": dict(GATHERED, row_splits=[0, 2, 5]),
    "pack_over_threshold": dict(GATHERED, threshold=HALVES, row_splits=[0, 2, 5]),
    "mean_of_sparse": dict(
        words=np.array([[1, 4], [-1, -1]], np.int32),
        scale=np.ones((2, 2), np.float32),
        row_splits=[0, 2, 5],
    ),
    "find_largest": dict(x=X, count=3),
    "clear_elements": dict(x=X, indices=np.array([4, -1], np.int32)),
    "mean_of_pairs": dict(
        indices=np.array([[4, -1], [0, 4]], np.int32),
        values=np.ones((2, 2), np.float32),
        count=5,
    ),
    "pack_largest": dict(CHUNKS, x=X),
    "mean_of_largest": dict(
        CHUNKS, words=LONG_WORDS, levels=np.ones((2, 2, 2), np.float32)
    ),
    "first_nonfinite": dict(x=X, is_finite=False),
    "add_scaled": dict(x=X, y=X, factor=0.5),
    "round_to_bfloat16": dict(x=X, stream=STREAM),
    "multiply_matrices": dict(MATRICES, x=X, right=FACTOR),
    "multiply_sum": dict(
        MATRICES, x=X, y=X, factor=0.5, left=FACTOR, right=X, query=FACTOR
    ),
    "multiply_transposed": dict(MATRICES, x=X, left=FACTOR),
    "multiply_factors": dict(MATRICES, left=FACTOR, right=X),
    "subtract_factors": dict(MATRICES, x=X, left=FACTOR, right=X),
    "orthonormalize": dict(x=X, rows=[2, 3], rank=1),
}
HUGE = 2**40
NO_WORKERS = np.zeros((0, 1), np.int32)
BAD_VECTOR = [X[:4], X[np.newaxis], np.float32(1)]
# The gradient may have any shape.
BAD_X = [X[:4], np.float32(1), SplitVector(tf.split(np.ones(6, np.float32), [0, 5, 1]))]
BAD_SIZES = [[4], [2, 4], [6, -1], [2, 3, 2**62, 2**62, 2**62, 2**62]]
BAD_SPLITS = [
    [0, 2, 4],
    [1, 2, 5],
    [0, 5, 5],
    [0, 6, 5],
    [0, -1, 5],
    [0, 2, 3, 5],
    [0],
    [],
    [[0, 2, 5]],
]
# For operations in which no other argument determines the number of blocks.
BAD_SPLITS_ALONE = [s for s in BAD_SPLITS if s != [0, 2, 3, 5]]
BAD_SPLITS_FIRST = [[1, 2, 5], [0, 5, 5], [0, 6, 5], [0, -1, 5], [0, 2, 3, 5], [5]]
BAD_WORDS = [LONG_WORDS, WORDS[0], NO_WORKERS]
BAD_STREAM = [STREAM[:2], STREAM[np.newaxis]]
BAD_BASE = [1, 0, -1, 2**32 + 1, HUGE]
BAD_COUNT = [-1, 50, HUGE, 2**62]
BAD_SCALAR = [ONE, X]
BAD_GATHERED = dict(
    x=BAD_X,
    moments=BAD_X,
    residual=BAD_VECTOR,
    variance=BAD_VECTOR,
    alpha=[-1.0, np.inf, np.nan],
    decay=[-0.1, 1.1, np.nan],
)
BAD_FACTOR = [X, FACTOR[:3], FACTOR[np.newaxis], np.float32(1)]
BAD_MATRICES = dict(
    rows=[[2], [2, 2], [1, 2], [-2, 1], [2, -1], [0, 5], [HUGE, 1], [2**46, 1]],
    columns=[[2], [1, 1], [0, 0], [-2, 0], [2, -1], [HUGE, 0]],
    rank=[0, -1, 1, 3, HUGE, 2**62],
)
BAD_CHUNKS = dict(
    k=[0, -1, 5, HUGE], chunk=[-1, 0, 1, 2, 2**16 + 1, HUGE], bits=[-1, 0, 4, HUGE]
)
BAD_SENT = dict(
    sent_words=BAD_WORDS,
    sent_scale=[TWO, np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)],
    residual=[np.ones(40, np.float32), *BAD_VECTOR[1:]],
    ratio=BAD_SCALAR,
    row_splits=BAD_SPLITS,
)
# Invalid values of single arguments, while all others are those of CALLS.
BAD = {
    "pack_codes": dict(codes=[np.int32(1), WORDS], base=BAD_BASE),
    "unpack_codes": dict(
        words=[np.int32(1), LONG_WORDS], base=BAD_BASE, count=BAD_COUNT
    ),
    "pack_signs": dict(stream=BAD_STREAM),
    "pack_signs_checked": dict(stream=BAD_STREAM),
    "pack_momentum_signs": dict(
        x=BAD_X, momentum=BAD_VECTOR, warming_up=[[True]], stream=BAD_STREAM
    ),
    "pack_ternary": dict(
        x=BAD_X,
        limit=[ONE, X],
        scale=[ONE, X],
        row_splits=BAD_SPLITS,
        stream=BAD_STREAM,
    ),
    "block_statistics": dict(
        x=BAD_X, row_splits=BAD_SPLITS_ALONE, sums=[["l1", "best"], [""]]
    ),
    "sum_codes": dict(
        words=BAD_WORDS,
        base=[*BAD_BASE, 2**32],
        count=BAD_COUNT,
        sum_base=[4, *BAD_BASE],
    ),
    "sum_levels": dict(
        sizes=BAD_SIZES,
        words=BAD_WORDS,
        scale=[ONE, X],
        row_splits=BAD_SPLITS_FIRST,
        base=BAD_BASE,
        step=[2**31, -(2**31), 2**30, HUGE],
        zero=[2**31, -(2**31), HUGE],
    ),
    "mean_of_signs": dict(
        sizes=BAD_SIZES,
        words=BAD_WORDS,
        scale=[TWO, np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)],
        row_splits=BAD_SPLITS_FIRST,
    ),
    "find_levels": dict(
        x=BAD_X,
        row_splits=BAD_SPLITS_ALONE,
        rule=["best", "", "symmetric", "means"],
        count=[-1, 0, 1, 4, 6, 2**16 + 1, HUGE],
        sweeps=[-1],
    ),
    "pack_levels": dict(
        x=BAD_X,
        levels=[
            TWO,
            np.ones((1, 3), np.float32),
            np.ones((2, 0), np.float32),
            np.ones((2, 1), np.float32),
            np.ones((2, 2**16 + 1), np.float32),
            np.ones((2, 3, 1), np.float32),
        ],
        row_splits=BAD_SPLITS,
        stream=BAD_STREAM,
    ),
    "mean_of_levels": dict(
        sizes=BAD_SIZES,
        words=BAD_WORDS,
        levels=[
            np.ones((2, 3), np.float32),
            np.ones((1, 2, 3), np.float32),
            np.ones((2, 1, 3), np.float32),
            np.ones((2, 2, 0), np.float32),
            np.ones((2, 2, 1), np.float32),
            np.ones((2, 2, 2**16 + 1), np.float32),
        ],
        row_splits=BAD_SPLITS_FIRST,
    ),
    "majority_vote": dict(
        words=BAD_WORDS,
        count=BAD_COUNT,
        base=[*BAD_BASE, 4],
        reply_base=[*BAD_BASE, 4],
        quorum=[2**31, -(2**31), HUGE],
        stream=BAD_STREAM,
    ),
    "sign_error_feedback": dict(
        x=BAD_X,
        momentum=BAD_VECTOR,
        residual=BAD_VECTOR,
        ratio=BAD_SCALAR,
        moving=[[True]],
        row_splits=BAD_SPLITS_ALONE,
    ),
    "mean_sign_error_feedback": dict(BAD_SENT, moving=[[True]]),
    "mean_sign_sums": BAD_SENT,
    "mean_sign_residual": dict(
        BAD_SENT, moving=[[True]], words=[WORDS, LONG_WORDS[0]], scale=[ONE, X]
    ),
    "pack_unambiguous": dict(BAD_GATHERED, row_splits=BAD_SPLITS_ALONE),
    "pack_over_threshold": dict(
        BAD_GATHERED,
        moments=[*BAD_X, None],
        variance=[*BAD_VECTOR, None],
        threshold=[ONE, *(np.float32([0.5, t]) for t in (0, -1, np.inf, np.nan))],
        row_splits=BAD_SPLITS_ALONE,
    ),
    "mean_of_sparse": dict(
        sizes=BAD_SIZES,
        words=[
            WORDS[0],
            NO_WORKERS,
            LONG_WORDS[:1],
            np.array([[1, 4], [3, 2]], np.int32),
            np.array([[1, 1], [3, 4]], np.int32),
            np.array([[-1, 2], [3, 4]], np.int32),
        ],
        scale=[TWO, np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)],
        row_splits=[*BAD_SPLITS_FIRST, [0, 2, 2**28]],
    ),
    "find_largest": dict(count=[-1, 6, np.ones(1, np.int32)]),
    "clear_elements": dict(
        x=[X[np.newaxis], X[:4]], indices=[np.int32([5]), np.int32(1), LONG_WORDS]
    ),
    "mean_of_pairs": dict(
        indices=[LONG_WORDS[0], np.zeros((0, 2), np.int32), np.int32([[0, 1], [5, 0]])],
        values=[ONE, np.ones((2, 1), np.float32), np.ones((1, 2), np.float32)],
        count=[-1, 4],
    ),
    "pack_largest": dict(BAD_CHUNKS, x=BAD_X, row_splits=[*BAD_SPLITS_ALONE, [0, 5]]),
    "mean_of_largest": dict(
        BAD_CHUNKS,
        sizes=BAD_SIZES,
        words=[LONG_WORDS[0], np.zeros((0, 2), np.int32), WORDS, LONG_WORDS[:1]],
        levels=[
            np.ones((2, 2), np.float32),
            np.ones((1, 2, 2), np.float32),
            np.ones((2, 1, 2), np.float32),
            np.ones((2, 2, 1), np.float32),
            np.ones((2, 2, 3), np.float32),
        ],
        row_splits=[*BAD_SPLITS_FIRST, [0, 1, 6]],
    ),
    "first_nonfinite": dict(is_finite=[np.ones(1, bool)]),
    "add_scaled": dict(x=BAD_X, y=BAD_VECTOR, factor=BAD_SCALAR),
    "round_to_bfloat16": dict(x=[ONE[0], X[np.newaxis]], stream=BAD_STREAM),
    "multiply_matrices": dict(BAD_MATRICES, x=BAD_X, right=BAD_FACTOR),
    "multiply_sum": dict(
        BAD_MATRICES,
        x=BAD_X,
        y=BAD_VECTOR,
        factor=BAD_SCALAR,
        left=BAD_FACTOR,
        right=BAD_VECTOR,
        query=BAD_FACTOR,
    ),
    "multiply_transposed": dict(BAD_MATRICES, x=BAD_X, left=BAD_FACTOR),
    "multiply_factors": dict(
        BAD_MATRICES, left=BAD_FACTOR, right=BAD_VECTOR, sizes=BAD_SIZES
    ),
    "subtract_factors": dict(
        BAD_MATRICES, x=BAD_VECTOR, left=BAD_FACTOR, right=BAD_VECTOR
    ),
    "orthonormalize": dict(
        x=BAD_VECTOR,
        rows=[[2], [2, 3, 0], [5, 0], [7, -2], [HUGE], [2**62, 2**62]],
        rank=[0, -1, 2, HUGE, 2**62],
    ),
}
