"""BinGrad: two levels an element, placed by the block's own values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import SentCodebook

VARIANTS = ("b", "pb")


@dataclass(frozen=True)
class BinGrad(SentCodebook):
    r"""Rounds each element to one of two levels of its block.

    `"b"`, biased, has the smaller error: \( b_0 \) is the mean of the block, \( b_{-1}
    \) that of the elements below it, \( b_1 \) that of the others; elements below \(
    b_0 \) become \( b_{-1} \), the others \( b_1 \).

    `"pb"`, partly biased, has levels \( \pm b_1 \) with \( n b_1 = \sum_{|v| \ge b_1}
    |v| \) over the n elements, as nearly as an element's magnitude comes to it. What
    lies between them is rounded at random without bias, what lies outside goes to the
    nearest.

    Attributes:
        variant: `"b"` or `"pb"`.
        table_dtype: The type in which the two levels of each block travel, rounded to
            nearest: `"float32"`, `"bfloat16"` or `"float16"`, in which a level beyond
            \( \pm 65504 \) is infinite and the step one that is skipped.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = DistEFSGD(inner, BinGrad(), block_size=2048)
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Eq. 14 to 17.
    """

    short_name: ClassVar[str | None] = "bingrad"

    variant: str = "b"
    table_dtype: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(
                f"variant must be one of {VARIANTS}. Received: variant={self.variant!r}"
            )

    @property
    @override
    def contracts(self):  # type: ignore[override]
        return self.variant == "b"

    @property
    @override
    def count(self):
        return 2

    @override
    def block_levels(self, x, layout):
        splits = layout.row_splits
        if self.variant == "pb":
            levels, nonfinite = ops.find_levels(x, splits, "symmetric", 2)
            return levels, nonfinite, None
        means, nonfinite = ops.find_levels(x, splits, "means", 3)
        return tf.gather(means, [0, 2], axis=1), nonfinite, means[:, 1:2]
