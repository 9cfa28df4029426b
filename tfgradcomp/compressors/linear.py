"""Linear quantization: random rounding to evenly spaced quantiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import SentCodebook, check_levels, outward


@dataclass(frozen=True)
class LinearQuantization(SentCodebook):
    r"""Rounds each element at random to an adjacent quantile, without bias.

    Level k of a block of n elements is the element of rank \( k (n - 1) / (s - 1) \),
    so that all levels are used equally often. Most levels are close to zero, where the
    elements are dense.

    Attributes:
        levels: s, from 2 to 257. Codes take \( \log_2 s \) bits each.
        table_dtype: As for `ORQ`.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = DistEFSGD(inner, LinearQuantization(levels=17), block_size=2048)
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Section 5 (Linear-s).
    """

    short_name: ClassVar[str | None] = "linear"

    levels: int = 9
    table_dtype: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        check_levels(self.levels, "an integer, at least 2", lambda s: s >= 2)

    @property
    @override
    def count(self):
        return self.levels

    @override
    def block_levels(self, x, layout):
        levels, nonfinite = ops.find_levels(
            x, layout.row_splits, "quantiles", self.levels
        )
        return outward(levels, self.table_dtype), nonfinite, None
