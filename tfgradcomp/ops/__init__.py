"""The operations of compression: native where they can be, else pure TensorFlow.

Both give the same bits. `reference` says what is computed; `python -m tfgradcomp.ops
--info` says which library serves. The environment variable `TFGRADCOMP_OPS` chooses,
where a function is called or traced:

- `auto` (default): native where the library loads and has the operation; the reference
  else, with one warning that says what to do.
- `native`: the library, or an error that says why there is none.
- `python`: the reference.

Inside XLA (`jit_compile`) the reference is taken: XLA compiles no operations of others.
"""

from __future__ import annotations

from tfgradcomp import lazy

__all__ = [
    "INDEX_BITS",
    "NOTHING",
    "SplitVector",
    "Statistics",
    "apply_decoded",
    "block_statistics",
    "coins",
    "digits_per_word",
    "find_levels",
    "majority_vote",
    "mean_magnitude",
    "mean_of_levels",
    "mean_of_signs",
    "mean_of_sparse",
    "mean_of_sums",
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
    "sum_codes",
    "sum_levels",
    "uniform",
    "unpack_codes",
    "widths",
    "words_for",
]

# Imported at their first use: `python -m tfgradcomp.ops` must be able to silence
# TensorFlow before TensorFlow is imported.
_ORIGINS = dict.fromkeys(__all__, "tfgradcomp.ops.dispatch") | {
    "INDEX_BITS": "tfgradcomp.ops.word_format",
    "NOTHING": "tfgradcomp.ops.word_format",
    "SplitVector": "tfgradcomp.core.split_vector",
    "Statistics": "tfgradcomp.ops.reference",
    "apply_decoded": "tfgradcomp.ops.native.calls",
    "coins": "tfgradcomp.ops.reference",
    "digits_per_word": "tfgradcomp.ops.word_format",
    "random_bits": "tfgradcomp.ops.reference",
    "spread": "tfgradcomp.ops.reference",
    "uniform": "tfgradcomp.ops.reference",
    "widths": "tfgradcomp.ops.reference",
    "words_for": "tfgradcomp.ops.word_format",
}

__getattr__ = lazy.attributes(__name__, _ORIGINS)


def __dir__() -> list[str]:
    return __all__
