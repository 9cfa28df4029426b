"""The native operations: `reference`'s names, signatures and results.

The first call of any of them loads the library (`tfgradcomp.ops.library`). It may raise
`library.UnavailableError`; then `tfgradcomp.ops` uses the reference.
"""

from tfgradcomp.ops.native.blocks import (
    block_statistics,
)
from tfgradcomp.ops.native.codes import (
    pack_codes,
    pack_ternary,
    sum_codes,
    sum_levels,
    unpack_codes,
)
from tfgradcomp.ops.native.error_feedback import (
    mean_sign_error_feedback,
    mean_sign_residual,
    mean_sign_sums,
    sign_error_feedback,
)
from tfgradcomp.ops.native.levels import (
    find_levels,
    mean_of_levels,
    pack_levels,
)
from tfgradcomp.ops.native.rounding import (
    round_to_bfloat16,
)
from tfgradcomp.ops.native.signs import (
    mean_of_signs,
    pack_momentum_signs,
    pack_signs,
    pack_signs_checked,
)
from tfgradcomp.ops.native.sparse import (
    mean_of_sparse,
    pack_over_threshold,
    pack_unambiguous,
)
from tfgradcomp.ops.native.votes import (
    majority_vote,
)

__all__ = [
    "block_statistics",
    "find_levels",
    "majority_vote",
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
    "round_to_bfloat16",
    "sign_error_feedback",
    "sum_codes",
    "sum_levels",
    "unpack_codes",
]
