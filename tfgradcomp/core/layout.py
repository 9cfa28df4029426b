"""The layout of a flat vector: its blocks."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """The layout of a flat vector: its division into blocks.

    Block `b` is the range `[row_splits[b], row_splits[b + 1])`. No block is empty and
    nothing is padded, so padding can enter no scale, no level and no residual.

    Attributes:
        row_splits: `num_blocks + 1` increasing offsets, the first 0.
        sizes: Elements of each of the tensors that the vector is made of; decoded
            vectors are then `SplitVector`s of these sizes, where a compressor can
            write them so. None where that is not known or does not matter.
    """

    row_splits: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    @classmethod
    def from_sizes(
        cls, sizes: list[int], block_size: int | str | None = None
    ) -> Layout:
        """Cuts the concatenation of tensors into blocks.

        Args:
            sizes: Elements of each tensor.
            block_size: None: a block is a tensor. An integer: blocks of that many
                elements of the flat vector, the last may be short. `"model"`: one
                block.
        """
        total = sum(sizes)
        if block_size is None:
            splits = [0, *itertools.accumulate(sizes)]
        else:
            step = max(total, 1) if block_size == "model" else int(block_size)
            splits = [*range(0, total, step), total]
        own = tuple(int(size) for size in sizes)
        return cls(tuple(int(s) for s in splits), own or None)

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

    def part(self, begin: int, end: int) -> Layout:
        """Returns the layout of elements [begin, end), its blocks cut off there."""
        if begin == end:
            return Layout((0,))
        inside = self.blocks_in(begin, end)
        cuts = self.row_splits[inside.start + 1 : inside.stop]
        return Layout(tuple(split - begin for split in (begin, *cuts, end)))
