"""Compressors whose codes stand for arbitrary levels of a block."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Compressor, all_finite
from tfgradcomp.core import Context, Field, Fields, Layout, State, Vector
from tfgradcomp.core.arguments import check_choice

MOST_LEVELS = 257
TABLE_DTYPES = ("float32", "float16", "bfloat16")


class BlockValues(NamedTuple):
    """The numbers from which the levels of each block follow.

    Attributes:
        payload: A tensor for each of `Codebook.block_fields`.
        nonfinite: Numbers of elements that are infinite or NaN, of any shape.
        thresholds: For a deterministic rule, ascending, float32
            `[num_blocks, count - 1]`: an element's code is the number of thresholds
            that are not above it. None: an element is rounded at random, without bias,
            to one of its two adjacent levels.
    """

    payload: Fields
    nonfinite: tf.Tensor
    thresholds: tf.Tensor | None = None


@dataclass(frozen=True)
class Codebook(Compressor):
    r"""Rounds each element to a level of its block; a code c stands for \( b_c \).

    A subclass defines how many levels a block has (`count`), which numbers travel for
    each block (`block_fields`, `block_values`), and which levels follow from them
    (`table`). This class rounds, writes the payload and computes the mean.
    """

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """The number of levels of a block, from 2 to 257."""

    @abc.abstractmethod
    def block_fields(self, layout: Layout) -> dict[str, Field]:
        """Declares the fields of a block, besides the codes."""

    @abc.abstractmethod
    def block_values(self, x: Vector, layout: Layout) -> BlockValues:
        """Returns the numbers that travel for each block of `x`.

        If an element is infinite or NaN, the values may be arbitrary, because the step
        is skipped.
        """

    @abc.abstractmethod
    def table(self, payloads: Fields, layout: Layout) -> tf.Tensor:
        """Returns the levels that follow from the block values of N payloads.

        Args:
            payloads: The fields of `block_fields`, with a leading axis of workers.
            layout: The blocks of the flat vector.

        Returns:
            Ascending levels, float32 `[N, num_blocks, count]`.
        """

    @override
    def fields(self, layout):
        codes = Field(layout.size, base=self.count, per="element")
        return {"codes": codes, **self.block_fields(layout)}

    @override
    def compress(self, x, state, layout, context):
        return self.encode(x, self.block_values(x, layout), state, layout, context)

    def encode(
        self,
        x: Vector,
        values: BlockValues,
        state: State,
        layout: Layout,
        context: Context,
    ) -> Compressed:
        """Returns the payload of `x` with the levels that follow from `values`."""
        numbers = [v for v in values.payload.values() if v.dtype.is_floating]
        if values.thresholds is None:
            stacked = {name: v[tf.newaxis] for name, v in values.payload.items()}
            levels, stream = self.table(stacked, layout)[0], context.random_stream()
            # An element's probability is its place between two levels.
            numbers.append(levels[:, 1:] - levels[:, :-1])
        else:
            # Without a random stream the first and the last level are not used.
            levels, stream = tf.pad(values.thresholds, [[0, 0], [1, 1]]), None
        codes = ops.pack_levels(x, levels, layout.row_splits, stream)
        is_finite = tf.reduce_all(tf.equal(values.nonfinite, 0)) & all_finite(numbers)
        return Compressed({"codes": codes, **values.payload}, state, is_finite)

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
    """A codebook whose payload holds all levels of each block.

    A subclass computes the levels (`block_levels`) and has the attribute `table_dtype`,
    their type on the wire.
    """

    def __post_init__(self):
        check_choice("table_dtype", self.table_dtype, TABLE_DTYPES)

    @abc.abstractmethod
    def block_levels(
        self, x: Vector, layout: Layout
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Returns the levels of each block of `x`, before the cast to `table_dtype`.

        Returns:
            Ascending levels, `[num_blocks, count]`, then `nonfinite` and `thresholds`
            as in `BlockValues`.
        """

    @override
    def block_fields(self, layout):
        count = self.count
        return {
            "levels": Field(
                layout.num_blocks * count,
                dtype=self.table_dtype,
                per="block",
                items_per_block=count,
            )
        }

    @override
    def block_values(self, x, layout):
        levels, nonfinite, thresholds = self.block_levels(x, layout)
        levels = tf.cast(levels, self.table_dtype)
        payload = {"levels": tf.reshape(levels, [-1])}
        return BlockValues(payload, nonfinite, thresholds)

    @override
    def table(self, payloads, layout):
        levels = tf.cast(payloads["levels"], tf.float32)
        # Not -1: a shard may be empty.
        shape = [levels.shape[0], layout.num_blocks, self.count]
        return tf.reshape(levels, shape)


def check_levels(levels: int, kind: str, fits: Callable[[int], bool]) -> None:
    """Raises ValueError unless `levels` is an integer, at most 257, that `fits`."""
    is_integer = isinstance(levels, int) and not isinstance(levels, bool)
    if not is_integer or not fits(levels) or levels > MOST_LEVELS:
        raise ValueError(
            f"levels must be {kind}, at most {MOST_LEVELS}. Received: levels={levels!r}"
        )


def outward(levels: tf.Tensor, dtype: str) -> tf.Tensor:
    """Rounds ascending levels, `[num_blocks, count]`, without narrowing their range.

    The first level of a block is rounded down, the last level up, the others to the
    nearest number. An end level beyond the range of float16 becomes infinite.
    """
    if dtype == "float32":
        return levels
    nearest = tf.cast(levels, dtype)
    error = tf.cast(nearest, tf.float32) - levels
    first = tf.where(error[:, :1] > 0, _neighbour(nearest[:, :1], -1), nearest[:, :1])
    last = tf.where(error[:, -1:] < 0, _neighbour(nearest[:, -1:], 1), nearest[:, -1:])
    return tf.concat([first, nearest[:, 1:-1], last], 1)


def _neighbour(x, step):
    """Returns the next 16-bit number below (step -1) or above (step 1)."""
    bits = tf.cast(tf.bitcast(x, tf.int16), tf.int32)
    # The bits of magnitudes are in the order of the magnitudes.
    ordered = tf.where(bits < 0, bits ^ 0x7FFF, bits) + step
    bits = tf.where(ordered < 0, ordered ^ 0x7FFF, ordered)
    return tf.bitcast(tf.cast(bits, tf.int16), x.dtype)
