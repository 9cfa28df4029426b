"""The pieces of a bucket whose variables have no gradient in a step: they wait."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import tensorflow as tf

from tfgradcomp.engine.bucket_ranges import Piece
from tfgradcomp.engine.step_records import BucketState


class WaitingPieces:
    """The pieces of a bucket that take no part in a step.

    They are exchanged as zeros, with the first state in place of theirs, and their
    state stays as it was.

    Attributes:
        edges: The elements of the bucket where pieces begin or cease to wait.
        name: A name of the selection, the same on all workers.
    """

    def __init__(
        self, pieces: Sequence[Piece], padding: int, positions: Collection[int]
    ):
        """Selects the pieces that wait.

        Args:
            pieces: The pieces of the bucket.
            padding: Number of elements before them.
            positions: The variables that have a gradient.
        """
        waits = [piece.position not in positions for piece in pieces]
        sizes = [padding, *(end - begin for _, begin, end in pieces)]
        ends = [*itertools.accumulate(sizes)]
        spans = zip(itertools.pairwise([0, *ends]), [False, *waits], strict=True)
        self._spans = [(*span, waiting) for span, waiting in spans]
        self.edges = {
            edge
            for begin, end, waiting in self._spans
            if waiting and begin < end
            for edge in (begin, end)
        }
        number = sum(1 << index for index, waiting in enumerate(waits) if waiting)
        self.name = f"without_{number:x}"

    def merged(
        self, state: BucketState, waiting: BucketState, owned: range
    ) -> BucketState:
        """Returns a state in which the pieces that wait have another state.

        Args:
            state: The state of the other pieces.
            waiting: The state of the pieces that wait.
            owned: The elements whose server state is held here.
        """

        def merged(role, values, others):
            if role != "server":
                return self._joined(values, others, range(self._spans[-1][1]))
            # Where others hold the server's state, there is none that waits here.
            return self._joined(values, others, owned) if owned else values

        return BucketState(
            *(
                tf.nest.map_structure(
                    lambda value, other, role=role: merged(
                        role, tf.convert_to_tensor(value), tf.convert_to_tensor(other)
                    ),
                    values,
                    getattr(waiting, role),
                )
                for role, values in state._asdict().items()
            )
        )

    def _joined(self, values, others, owned):
        parts = []
        for begin, end, waiting in self._spans:
            begin, end = max(begin, owned.start), min(end, owned.stop)
            if begin < end:
                source = others if waiting else values
                parts.append(source[begin - owned.start : end - owned.start])
        return tf.concat([*parts, values[len(owned) :]], 0)
