"""Ranges of the flat vector: a range travels while the others are computed."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

from tfgradcomp.core import Layout
from tfgradcomp.ops.block_sums import CHUNK


class Piece(NamedTuple):
    """Elements [begin, end) of the tensor at a position, row by row."""

    position: int
    begin: int
    end: int


class BucketRange(NamedTuple):
    """Elements [begin, end) of the flat vector.

    Attributes:
        begin: First element.
        end: The element after the last.
        alignment: The vector is cut at multiples of it; padding makes up for the rest.
    """

    begin: int
    end: int
    alignment: int = CHUNK

    @property
    def alignment_padding(self) -> int:
        """Number of zeros before the range, a block by themselves.

        They keep the places of elements in the chunks of sums and in random streams,
        and so the bits of results, wherever buckets are cut.
        """
        return self.begin % self.alignment

    @property
    def offset(self) -> int:
        """Index of the first element in the vector, the padding included."""
        return self.begin - self.alignment_padding

    def layout(self, layout: Layout) -> Layout:
        """Returns the layout of the range, of the vector's layout."""
        splits = layout.part(self.begin, self.end).row_splits
        shapes = [self._shape(piece, layout) for piece in self.pieces(layout)]
        if self.alignment_padding:
            splits = (0, *(self.alignment_padding + split for split in splits))
            shapes = [(self.alignment_padding,), *shapes]
        return Layout(splits, tuple(shapes))

    @staticmethod
    def _shape(piece, layout):
        """Returns the shape of a piece: that of its tensor, or of a part of it."""
        shape, size = layout.shapes[piece.position], piece.end - piece.begin
        return shape if size == math.prod(shape) else (size,)

    def pieces(self, layout: Layout) -> list[Piece]:
        """Returns the pieces of the vector's tensors in the range."""
        pieces, start = [], 0
        for position, size in enumerate(layout.sizes or ()):
            begin, end = max(self.begin - start, 0), min(self.end - start, size)
            if begin < end:
                pieces.append(Piece(position, begin, end))
            start += size
        return pieces


def cut_ranges(layout: Layout, size: int, most: int | None = None) -> list[BucketRange]:
    """Cuts a vector between blocks, from its end, where gradients are ready first.

    The bucket at the front is a quarter as large: no computation is left that could
    hide its exchange.

    Args:
        layout: The blocks, which stay whole.
        size: The least number of elements of a bucket. A rest of less than half of it
            joins the neighbour.
        most: The most elements of a bucket, and of a block; None for any number.
    """
    splits, end, buckets = layout.row_splits, layout.size, []
    front = splits[bisect.bisect_left(splits, size // 4)] if size < end else 0
    for first in (front, 0):
        while end > first:
            begin = splits[max(bisect.bisect_right(splits, end - size) - 1, 0)]
            if 2 * (begin - first) < size:
                begin = first
            if most is not None:
                begin = max(begin, splits[bisect.bisect_left(splits, end - most)])
            buckets.append(BucketRange(begin, end))
            end = begin
    return buckets
