"""The pieces of a bucket whose variables have no gradient in a step: they wait."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import tensorflow as tf

from tfgradcomp.core.waiting_elements import WaitingElements
from tfgradcomp.engine.bucket_ranges import Piece
from tfgradcomp.engine.step_records import BucketState, StateLeaf


def waiting_elements(
    pieces: Sequence[Piece], padding: int, positions: Collection[int]
) -> WaitingElements:
    """Returns the elements of a bucket that take no part in a step.

    They are exchanged as zeros, with the first state in place of theirs, and their
    state stays as it was.

    Args:
        pieces: The pieces of the bucket.
        padding: Number of elements before them.
        positions: The variables that have a gradient.
    """
    waits = [piece.position not in positions for piece in pieces]
    sizes = [padding, *(end - begin for _, begin, end in pieces)]
    ends = [*itertools.accumulate(sizes)]
    spans = zip(itertools.pairwise([0, *ends]), [False, *waits], strict=True)
    number = sum(1 << index for index, waiting in enumerate(waits) if waiting)
    return WaitingElements(
        [(*span, is_waiting) for span, is_waiting in spans], f"without_{number:x}"
    )


def merged(
    elements: WaitingElements,
    leaves: Sequence[StateLeaf],
    state: BucketState,
    waiting: BucketState,
    owned: range,
) -> BucketState:
    """Returns a state in which the elements that wait have another state.

    Args:
        elements: The elements that wait.
        leaves: The leaves of the state.
        state: The state of the other elements.
        waiting: The state of the elements that wait.
        owned: The elements whose server state is held here; empty where servers have
            it, and where it stays as it is.
    """

    def joined(leaf, values, others):
        values, others = map(tf.convert_to_tensor, (values, others))
        if leaf.role != "server":
            return elements.of_items(leaf.sizes).joined(values, others)
        return elements.joined(values, others, owned) if owned else values

    pairs = zip(tf.nest.flatten(state), tf.nest.flatten(waiting), strict=True)
    values = [joined(leaf, *pair) for leaf, pair in zip(leaves, pairs, strict=True)]
    return tf.nest.pack_sequence_as(state, values)
