"""The layout of a flat vector: its blocks."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf


@dataclass(frozen=True)
class Layout:
    """The layout of a flat vector: its division into blocks.

    Block `b` is the range `[row_splits[b], row_splits[b + 1])`. No block is empty and
    nothing is padded, so padding can enter no scale, no level and no residual.

    Attributes:
        row_splits: `num_blocks + 1` increasing offsets, the first 0.
        shapes: The shape of each tensor that the vector is made of, in order; a part of
            a tensor is a vector. None if the tensors are unknown or do not matter.
    """

    row_splits: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def from_shapes(
        cls, shapes: Iterable[Sequence[int]], block_size: int | str | None = None
    ) -> Layout:
        """Cuts the concatenation of tensors into blocks.

        Args:
            shapes: The shape of each tensor.
            block_size: Elements of the flat vector in a block; the last block may be
                shorter. None: a block is a tensor. `"model"`: one block.
        """
        known = tuple(tuple(map(int, shape)) for shape in shapes)
        edges = [0, *itertools.accumulate(map(math.prod, known))]
        total = edges[-1]
        if block_size is None:
            return cls(tuple(edges), known or None)
        step = max(total, 1) if block_size == "model" else int(block_size)
        return cls((*range(0, total, step), total), known or None)

    @classmethod
    def from_sizes(
        cls, sizes: Iterable[int], block_size: int | str | None = None
    ) -> Layout:
        """Does what `from_shapes` does, for vectors of some sizes."""
        return cls.from_shapes([(size,) for size in sizes], block_size)

    @property
    def known_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes, or that of the whole vector if the tensors are unknown."""
        return self.shapes or ((self.size,),)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Elements of each tensor; None if the tensors are unknown.

        Compressors that can do so decode a vector as a `SplitVector` of these sizes.
        """
        return None if self.shapes is None else tuple(map(math.prod, self.shapes))

    @property
    def size(self) -> int:
        """Elements of the flat vector."""
        return self.row_splits[-1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.row_splits) - 1

    def blocks_in(self, begin: int, end: int) -> range:
        """Returns the indices of the blocks that reach into elements [begin, end)."""
        first = bisect.bisect_right(self.row_splits, begin) - 1
        return range(first, bisect.bisect_left(self.row_splits, end))

    def cut(self, most: int) -> Layout:
        """Returns the layout with longer blocks cut to `most` elements."""
        pieces = [
            range(begin, end, most)
            for begin, end in itertools.pairwise(self.row_splits)
        ]
        return replace(self, row_splits=(*itertools.chain(*pieces), self.size))

    def cut_at(self, edges: Iterable[int]) -> Layout:
        """Returns the layout with blocks cut at some elements."""
        return replace(self, row_splits=tuple(sorted({*self.row_splits, *edges})))

    def part(self, begin: int, end: int) -> Layout:
        """Returns the layout of elements [begin, end), its blocks cut off there."""
        if begin == end:
            return Layout((0,))
        inside = self.blocks_in(begin, end)
        cuts = self.row_splits[inside.start + 1 : inside.stop]
        return Layout(tuple(split - begin for split in (begin, *cuts, end)))


class VaryingLayout(Layout):
    """The layout of a vector whose size is known at run time only.

    `size` and `num_blocks` may be int32 tensors; `row_splits` is an int64 tensor.
    """

    @classmethod
    def from_size(
        cls, size: tf.Tensor, block_size: int | str | None = None
    ) -> VaryingLayout:
        """Cuts a vector of at least one element into blocks.

        Args:
            size: The number of elements.
            block_size: An integer, or None or `"model"` for a single block.
        """
        size = tf.cast(size, tf.int64)
        if isinstance(block_size, int):
            splits = tf.concat([tf.range(0, size, block_size), [size]], 0)
        else:
            splits = tf.stack([0, size])
        return cls(splits)

    @property
    def size(self) -> int:
        """Elements of the flat vector, an int32 scalar."""
        return tf.cast(self.row_splits[-1], tf.int32)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, an int32 scalar where it varies."""
        count = self.row_splits.shape[0]  # type: ignore[attr-defined]
        return tf.size(self.row_splits) - 1 if count is None else count - 1
