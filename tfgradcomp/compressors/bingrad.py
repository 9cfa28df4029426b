"""BinGrad: two levels an element, placed by the values of the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.codebook import SentCodebook
from tfgradcomp.core import Vector
from tfgradcomp.core.arguments import check_choice, check_integer


@dataclass(frozen=True)
class BinGrad(SentCodebook):
    r"""Rounds each element to one of two levels of its block.

    `"b"`, biased, has the smaller error: \( b_0 \) is the mean of the block, \( b_{-1}
    \) the mean of the elements below \( b_0 \), and \( b_1 \) the mean of the others.
    Elements below \( b_0 \) become \( b_{-1} \), the others \( b_1 \).

    `"pb"`, partly biased, has levels \( \pm b_1 \), where \( b_1 \) is the magnitude of
    an element that solves \( n b_1 = \sum_{|v| \ge b_1} |v| \) best. Elements between
    the levels are rounded at random without bias, others to the nearest level.

    Attributes:
        variant: `"b"` or `"pb"`.
        lloyd_steps: For `"b"`: number of times that \( b_0 \) moves to the middle
            between the two levels, and the levels to the means of their sides. No step
            makes the error larger.
        table_dtype: The type of the two levels of each block on the wire, rounded to
            nearest: `"float32"`, `"bfloat16"` or `"float16"`. A level beyond \( \pm
            65504 \) is infinite in float16, and the step is skipped.

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
    lloyd_steps: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_choice("variant", self.variant, ("b", "pb"))
        check_integer("lloyd_steps", self.lloyd_steps, 0)
        if self.lloyd_steps and self.variant != "b":
            raise ValueError(
                "lloyd_steps move the levels of variant 'b'; those of 'pb' are not "
                f"means. Received: variant='pb', lloyd_steps={self.lloyd_steps}"
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
        low, edge, high = tf.unstack(means, axis=1)
        for _ in range(self.lloyd_steps):
            edge = _normal(0.5 * low + 0.5 * high)
            low, high = means_of_sides(x, edge, splits)
        return tf.stack([low, high], 1), nonfinite, edge[:, tf.newaxis]


def means_of_sides(
    x: Vector, edge: tf.Tensor, splits: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the means of the elements below the edge of their block, and of others.

    A mean of no elements is the edge.

    Args:
        x: The vector.
        edge: float32 `[num_blocks]`.
        splits: Where the blocks begin and end.
    """
    x = _normal(tf.convert_to_tensor(x))
    is_below = x < ops.spread(edge, splits)

    def total(values):
        return ops.block_statistics(values, splits, ("sum",)).sum

    number = total(tf.cast(is_below, tf.float32))
    below = tf.math.divide_no_nan(total(tf.where(is_below, x, 0.0)), number)
    number_above = tf.cast(ops.widths(splits), tf.float64) - number
    above = tf.math.divide_no_nan(total(tf.where(is_below, 0.0, x)), number_above)
    # The elements of a constant block are all on one side.
    low = tf.where(number > 0, _normal(tf.cast(below, tf.float32)), edge)
    high = tf.where(number_above > 0, _normal(tf.cast(above, tf.float32)), edge)
    return low, high


def _normal(x):
    """Replaces denormals, which only some processors treat as zeros, by zeros."""
    return tf.where(tf.abs(x) >= np.finfo(np.float32).tiny, x, 0.0)
