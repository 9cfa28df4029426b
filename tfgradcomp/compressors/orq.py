"""ORQ: random rounding to optimal levels of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import SentCodebook, check_levels, outward


@dataclass(frozen=True)
class ORQ(SentCodebook):
    r"""Rounds each element at random to an adjacent level, without bias.

    v between \( b_{k-1} \) and \( b_k \) becomes \( b_k \) with probability \( (v -
    b_{k-1}) / (b_k - b_{k-1}) \). The levels are elements of the block: its smallest
    and its largest element, and recursively, between \( b_l \) and \( b_r \), the m-th
    largest of the n elements from \( b_l \) to \( b_r \), \( m = \lceil \sum_j (v_j -
    b_l) / (b_r - b_l) \rceil \). Given \( b_l \) and \( b_r \), no other level has a
    smaller expected square error.

    Attributes:
        levels: s, \( 2^K + 1 \) from 3 to 257. Codes take \( \log_2 s \) bits each.
        refine: Sweeps in which every level moves to its best place between its
            neighbours.
        table_dtype: The type of the s levels of each block on the wire: `"float32"`,
            `"bfloat16"` or `"float16"`. An end level beyond \( \pm 65504 \) is infinite
            in float16, and the step is skipped. End levels are rounded outward and
            codes refer to the rounded levels, so that there is no bias.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = DistEFSGD(inner, ORQ(levels=5), block_size=2048)
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Eq. 7 and 12, Algorithm 1.
    """

    short_name: ClassVar[str | None] = "orq"

    levels: int = 9
    refine: int = 0
    table_dtype: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        text = "a power of two plus 1, at least 3"
        check_levels(self.levels, text, lambda s: s >= 3 and (s - 1) & (s - 2) == 0)
        is_integer = isinstance(self.refine, int) and not isinstance(self.refine, bool)
        if not is_integer or self.refine < 0:
            raise ValueError(
                "refine must be a number of sweeps, 0 or more. "
                f"Received: refine={self.refine!r}"
            )

    @property
    @override
    def count(self):
        return self.levels

    @override
    def block_levels(self, x, layout):
        levels, nonfinite = ops.find_levels(
            x, layout.row_splits, "optimal", self.levels, self.refine
        )
        return outward(levels, self.table_dtype), nonfinite, None
