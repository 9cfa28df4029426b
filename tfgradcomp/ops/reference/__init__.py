"""The operations in pure TensorFlow: what the native ones must equal, bit for bit.

They run wherever TensorFlow does, inside XLA too. Vectors are flat; a gradient x may be
`SplitVector` of one. Blocks are given by `row_splits`: block b is the range
`[row_splits[b], row_splits[b + 1])`, none is empty.
`random_numbers` says what an element draws from a random `stream`.
"""

from tfgradcomp.ops.reference.blocks import (
    Statistics,
    block_statistics,
    mean_magnitude,
    spread,
    widths,
)
from tfgradcomp.ops.reference.codes import (
    pack_codes,
    pack_ternary,
    round_to_bfloat16,
    sum_codes,
    sum_levels,
    unpack_codes,
)
from tfgradcomp.ops.reference.levels import (
    find_levels,
    mean_of_levels,
    pack_levels,
)
from tfgradcomp.ops.reference.random_numbers import (
    coins,
    random_bits,
    uniform,
)
from tfgradcomp.ops.reference.signs import (
    majority_vote,
    mean_of_signs,
    mean_sign_error_feedback,
    mean_sign_residual,
    mean_sign_sums,
    pack_momentum_signs,
    pack_signs,
    pack_signs_checked,
    sign_error_feedback,
)
from tfgradcomp.ops.reference.sparse import (
    mean_of_sparse,
    pack_over_threshold,
    pack_unambiguous,
)

__all__ = [
    "Statistics",
    "block_statistics",
    "coins",
    "find_levels",
    "majority_vote",
    "mean_magnitude",
    "mean_of_levels",
    "mean_of_signs",
    "mean_of_sparse",
    "mean_sign_error_feedback",
    "mean_sign_residual",
    "mean_sign_sums",
    "pack_codes",
    "pack_levels",
    "pack_momentum_signs",
    "pack_over_threshold",
    "pack_signs",
    "pack_signs_checked",
    "pack_ternary",
    "pack_unambiguous",
    "random_bits",
    "round_to_bfloat16",
    "sign_error_feedback",
    "spread",
    "widths",
    "sum_codes",
    "sum_levels",
    "uniform",
    "unpack_codes",
]
