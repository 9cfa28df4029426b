"""Compressors whose codes stand for the levels of a block, wherever these lie."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressor
from tfgradcomp.core import Field, Layout

MOST_LEVELS = 257
TABLE_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Codebook(Compressor):
    r"""A code c stands for the level \( b_c \) of its block.

    Subclasses declare the field `codes`, say what the levels are, and override
    `compress`.
    """

    def table(self, payloads: dict[str, tf.Tensor], layout: Layout) -> tf.Tensor:
        """Returns b, float32 `[N, num_blocks, count]`, of N payloads."""
        raise NotImplementedError

    @override
    def decompress(self, payload, layout):
        return self.mean({k: v[tf.newaxis] for k, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        table = self.table(payloads, layout)
        return ops.mean_of_levels(
            payloads["codes"], table, layout.row_splits, layout.sizes
        )


@dataclass(frozen=True)
class SentCodebook(Codebook):
    """A `Codebook` whose levels travel, all of each block, as `table_dtype`.

    Subclasses have the attribute `table_dtype` and say how many levels there are.
    """

    def __post_init__(self):
        if self.table_dtype not in TABLE_DTYPES:
            raise ValueError(
                f"table_dtype must be one of {TABLE_DTYPES}. "
                f"Received: table_dtype={self.table_dtype!r}"
            )

    @property
    def count(self) -> int:
        """The number of levels of a block."""
        raise NotImplementedError

    @override
    def fields(self, layout):
        count = self.count
        return {
            "codes": Field(layout.size, base=count, per="element"),
            "levels": Field(
                layout.num_blocks * count,
                dtype=self.table_dtype,
                per="block",
                items_per_block=count,
            ),
        }

    @override
    def table(self, payloads, layout):
        levels = tf.cast(payloads["levels"], tf.float32)
        # Not -1: a shard may be empty.
        shape = [levels.shape[0], layout.num_blocks, self.count]
        return tf.reshape(levels, shape)


def check_levels(levels: int, fits: bool, kind: str) -> None:
    """Raises ValueError unless `levels` is an integer, at most 257, and `fits`."""
    is_integer = isinstance(levels, int) and not isinstance(levels, bool)
    if not is_integer or not fits or levels > MOST_LEVELS:
        raise ValueError(
            f"levels must be {kind}, at most {MOST_LEVELS}. Received: levels={levels!r}"
        )


def outward(levels: tf.Tensor, dtype: str) -> tf.Tensor:
    """Rounds levels to `dtype` so that nothing between the ends comes to lie outside.

    The first level of a block is rounded down, the last one up, the others to nearest.

    Args:
        levels: Ascending, float32 `[num_blocks, count]`.
        dtype: One of `TABLE_DTYPES`. Beyond the range of float16 an end is infinite.

    Returns:
        The levels, still ascending.
    """
    if dtype == "float32":
        return levels
    nearest = tf.cast(levels, dtype)
    error = tf.cast(nearest, tf.float32) - levels
    first = tf.where(error[:, :1] > 0, _neighbour(nearest[:, :1], -1), nearest[:, :1])
    last = tf.where(error[:, -1:] < 0, _neighbour(nearest[:, -1:], 1), nearest[:, -1:])
    return tf.concat([first, nearest[:, 1:-1], last], 1)


def _neighbour(x, step):
    """The next number below (-1) or above (1), of 16 bits."""
    bits = tf.cast(tf.bitcast(x, tf.int16), tf.int32)
    # Bits of magnitudes have the order of the magnitudes.
    ordered = tf.where(bits < 0, bits ^ 0x7FFF, bits) + step
    bits = tf.where(ordered < 0, ordered ^ 0x7FFF, ordered)
    return tf.bitcast(tf.cast(bits, tf.int16), x.dtype)
