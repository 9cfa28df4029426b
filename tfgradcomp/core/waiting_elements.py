"""The elements of a flat vector whose variables have no gradient in a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tensorflow as tf


@dataclass(frozen=True)
class WaitingElements:
    """A selection of elements that take no part in a step.

    Attributes:
        spans: Begin and end of consecutive ranges of the vector, and whether their
            elements wait.
        name: A name of the selection, the same on all workers.
    """

    spans: Sequence[tuple[int, int, bool]]
    name: str

    @property
    def edges(self) -> set[int]:
        """The elements where others begin or cease to wait."""
        waiting = [(b, e) for b, e, is_waiting in self.spans if is_waiting and b < e]
        return {edge for span in waiting for edge in span}

    def of_items(self, sizes: Sequence[int]) -> WaitingElements:
        """Returns the selection of items in a vector of another size.

        Args:
            sizes: Items of each tensor; the last spans are those of tensors.
        """
        waits = [is_waiting for *_, is_waiting in self.spans[-len(sizes) :]]
        pairs = itertools.pairwise([0, *itertools.accumulate(sizes)])
        spans = [(*pair, waiting) for pair, waiting in zip(pairs, waits, strict=True)]
        return replace(self, spans=spans)

    def joined(
        self, values: tf.Tensor, others: tf.Tensor, owned: range | None = None
    ) -> tf.Tensor:
        """Returns a vector with other values of the elements that wait.

        Args:
            values: The values of all elements, or of those `owned`.
            others: The values of elements that wait, in the same places.
            owned: The elements that the vectors consist of; None: all.
        """
        owned = range(self.spans[-1][1]) if owned is None else owned
        parts = []
        for begin, end, is_waiting in self.spans:
            begin, end = max(begin, owned.start), min(end, owned.stop)
            if begin < end:
                source = others if is_waiting else values
                parts.append(source[begin - owned.start : end - owned.start])
        return tf.concat([*parts, values[len(owned) :]], 0)
