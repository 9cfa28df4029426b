"""Sums of blocks from the sums of their parts, with the bits of `block_statistics`.

A block is summed as a tree over its chunks (custom_ops/word_format.h): adjacent pairs,
pairs of these, and so on. A worker that holds a range of chunks sums the subtrees that
lie within the range; to the operations, each subtree is a block. Their few sums are
then added in the order of the whole tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.core.word_format import CHUNK as CHUNK


class Part(NamedTuple):
    """A subtree of a block's sum: elements [begin, end) of the vector.

    Attributes:
        block: Index of the block.
        level: Height of the subtree; it has at most `2**level` chunks.
        index: Its place among the block's subtrees of that height.
    """

    block: int
    level: int
    index: int  # type: ignore[assignment]  # It hides tuple.index.
    begin: int
    end: int


def parts_of(row_splits: Sequence[int], begin: int, end: int) -> list[Part]:
    """Cuts each block's share of elements [begin, end) into the fewest subtrees.

    `begin` and `end` are multiples of `CHUNK`, or the end of the vector.
    """
    parts = []
    for block, (start, stop) in enumerate(itertools.pairwise(row_splits)):
        if stop <= begin or start >= end:
            continue
        first = start // CHUNK
        count = _chunks(start, stop)
        low = max(begin // CHUNK - first, 0)
        high = min(-(-end // CHUNK) - first, count)
        while low < high:
            level = 0
            while (
                1 << level < count
                and low % (2 << level) == 0
                and min(low + (2 << level), count) <= high
            ):
                level += 1
            after = min(low + (1 << level), count)
            part_begin = max(start, (first + low) * CHUNK)
            part_end = min(stop, (first + after) * CHUNK)
            parts.append(Part(block, level, low >> level, part_begin, part_end))
            low = after
    return parts


def add_up(
    sums: tf.Tensor, parts: Iterable[Part], row_splits: Sequence[int]
) -> tf.Tensor:
    """Returns the sum of each block, float64 `[num_blocks]`.

    `sums` are those of the parts of all blocks; a part may occur twice.
    """
    counts = [_chunks(*block) for block in itertools.pairwise(row_splits)]
    heights = [(count - 1).bit_length() for count in counts]
    places = {part[:3]: place for place, part in enumerate(parts)}
    size = sums.shape[0]
    for level in range(max(heights, default=0)):
        lefts, rights = [], []
        for block, height, index in list(places):
            if height != level or level == heights[block] or index % 2:
                continue
            parent = block, level + 1, index // 2
            if (index + 1) << level >= counts[block]:  # It has no partner.
                places[parent] = places[block, level, index]
                continue
            lefts.append(places[block, level, index])
            rights.append(places[block, level, index + 1])
            places[parent] = size
            size += 1
        if lefts:
            pairs = tf.gather(sums, lefts) + tf.gather(sums, rights)
            sums = tf.concat([sums, pairs], 0)
    roots = [places[block, height, 0] for block, height in enumerate(heights)]
    return tf.gather(sums, tf.constant(roots, tf.int32))


def _chunks(start, stop):
    return (stop - 1) // CHUNK - start // CHUNK + 1
