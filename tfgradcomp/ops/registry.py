"""The public names of `tfgradcomp.ops`: each operation is registered here, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgradcomp.core.split_vector import SplitVector, Vector
from tfgradcomp.core.word_format import INDEX_BITS, NOTHING, digits_per_word, words_for
from tfgradcomp.ops.dispatch import can_apply
from tfgradcomp.ops.native import apply_decoded, apply_vector
from tfgradcomp.ops.operation import Operation
from tfgradcomp.ops.reference import (
    blocks,
    chunks,
    codes,
    levels,
    low_rank,
    pairs,
    residuals,
    signs,
    sparse,
    vectors,
)
from tfgradcomp.ops.reference.blocks import Statistics, mean_of_sums, spread, widths
from tfgradcomp.ops.reference.random_numbers import coins, random_bits, uniform


def _first(tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns an optional output of a native op."""
    return tensors[0] if tensors else None


pack_codes = Operation(
    codes.pack_codes,
    arguments=lambda codes, base: {"codes": tf.cast(codes, tf.int32), "base": base},
)
unpack_codes = Operation(codes.unpack_codes, static="count")
sum_codes = Operation(codes.sum_codes, static="count", optional=["sum_base"])
sum_levels = Operation(codes.sum_levels, static="row_splits", applicable=True)
pack_ternary = Operation(codes.pack_ternary, vectors=["x"])

first_nonfinite = Operation(vectors.first_nonfinite, vectors=["x"], on_gpu=False)
add_scaled = Operation(residuals.add_scaled, vectors=["x"])
round_to_bfloat16 = Operation(residuals.round_to_bfloat16)

pack_signs = Operation(
    signs.pack_signs,
    vectors=["x"],
    optional=["stream"],
    results=lambda outputs: outputs.words,
)
pack_signs_checked = Operation(
    signs.pack_signs_checked, op="pack_signs", vectors=["x"], optional=["stream"]
)
pack_momentum_signs = Operation(
    signs.pack_momentum_signs,
    vectors=["x"],
    optional=["stream"],
    # In float32, 1 - beta would have other bits.
    arguments=lambda beta, **rest: {"beta": beta, "one_minus_beta": 1 - beta, **rest},
)
mean_of_signs = Operation(signs.mean_of_signs, static="row_splits", applicable=True)
majority_vote = Operation(signs.majority_vote, static="count", optional=["stream"])

sign_error_feedback = Operation(
    signs.sign_error_feedback,
    vectors=["x"],
    optional=["momentum"],
    results=lambda outputs: (
        outputs.words,
        outputs.scale,
        _first(outputs.new_momentum),
        outputs.new_residual,
    ),
)
mean_sign_error_feedback = Operation(signs.mean_sign_error_feedback)
mean_sign_sums = Operation(signs.mean_sign_sums)
mean_sign_residual = Operation(signs.mean_sign_residual)

block_statistics = Operation(
    blocks.block_statistics,
    vectors=["x"],
    results=lambda table: Statistics(*tf.unstack(table)),
)
find_levels = Operation(levels.find_levels, vectors=["x"])
pack_levels = Operation(levels.pack_levels, vectors=["x"], optional=["stream"])
mean_of_levels = Operation(levels.mean_of_levels, static="row_splits", applicable=True)

pack_unambiguous = Operation(sparse.pack_unambiguous, vectors=["x", "moments"])
pack_over_threshold = Operation(
    sparse.pack_over_threshold,
    vectors=["x", "moments"],
    optional=["variance"],
    results=lambda outputs: (
        outputs.words,
        outputs.new_residual,
        _first(outputs.new_variance),
        outputs.nonfinite,
    ),
)
mean_of_sparse = Operation(sparse.mean_of_sparse)

find_largest = Operation(pairs.find_largest, vectors=["x"], on_gpu=False)
clear_elements = Operation(pairs.clear_elements, on_gpu=False)
mean_of_pairs = Operation(pairs.mean_of_pairs, static="count", on_gpu=False)

pack_largest = Operation(chunks.pack_largest, vectors=["x"])
mean_of_largest = Operation(chunks.mean_of_largest, static="row_splits")

multiply_matrices = Operation(low_rank.multiply_matrices, vectors=["x"])
multiply_transposed = Operation(low_rank.multiply_transposed, vectors=["x"])
multiply_factors = Operation(low_rank.multiply_factors, applicable=True)
subtract_factors = Operation(low_rank.subtract_factors, on_gpu=False)
multiply_sum = Operation(
    low_rank.multiply_sum,
    vectors=["x"],
    results=lambda outputs: (outputs.total, outputs.products),
    on_gpu=False,
)
orthonormalize = Operation(low_rank.orthonormalize)

OPERATIONS: dict[str, Operation] = {
    name: value for name, value in list(globals().items()) if type(value) is Operation
}
for _op in {operation.op for operation in OPERATIONS.values()}:
    tf.no_gradient("Tfgradcomp>" + _op.title().replace("_", ""))


def mean_magnitude(x: Vector, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the mean |x| of each block, float32 `[num_blocks]`."""
    return mean_of_sums(block_statistics(x, row_splits, ("l1",)).l1, row_splits)


PUBLIC: dict[str, Any] = OPERATIONS | {
    "INDEX_BITS": INDEX_BITS,
    "NOTHING": NOTHING,
    "SplitVector": SplitVector,
    "Statistics": Statistics,
    "apply_decoded": apply_decoded,
    "apply_vector": apply_vector,
    "can_apply": can_apply,
    "coins": coins,
    "digits_per_word": digits_per_word,
    "mean_magnitude": mean_magnitude,
    "mean_of_sums": mean_of_sums,
    "random_bits": random_bits,
    "spread": spread,
    "uniform": uniform,
    "widths": widths,
    "words_for": words_for,
}
