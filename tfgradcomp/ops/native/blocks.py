"""Statistics of blocks, computed natively."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.native.calls import (
    operation,
    scale_of,
    splits,
    tensors,
)
from tfgradcomp.ops.reference import Statistics


def block_statistics(x: Vector, row_splits: Sequence[int]) -> Statistics:
    """Computes `reference.block_statistics`."""
    table = operation("block_statistics")(
        tensors(x), splits(row_splits), x_scale=scale_of(x)
    )
    return Statistics(*tf.unstack(table))
