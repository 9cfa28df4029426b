"""The context of a step: everything that a method may know besides its input."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfgradcomp.core.component import State
from tfgradcomp.core.split_vector import Vector

# Elements that share one block of random bits. Vectors are cut between such blocks.
DRAWN_TOGETHER = 128


class Context(NamedTuple):
    """Everything that a method may know about a step, besides its input.

    Attributes:
        step: int64 scalar, the number of updates applied so far.
        seed: int64 scalar.
        rank: This worker's index.
        num_workers: Python integer N.
        learning_rate: float32 scalar, the step size of this step.
        previous_learning_rate: float32 scalar, the last non-zero step size before it.
        offset: Index of the vector's first element in the whole vector, a multiple of
            `DRAWN_TOGETHER`.
        second_moments: If the vector is a sum over examples, the sums of the squares
            of its terms, element by element; None if they are not known.
        prepared: The result of `Compressor.prepare`, with the fields of the first round
            reduced over all workers; None if there is no first round.
        server_state: The state of a server that is `read_by_workers`; else `()`.
        weights: float32 `[N]`, the weight of each worker in a mean; None: all are
            equal. A server that `takes_weights` reads it.
    """

    step: tf.Tensor
    seed: tf.Tensor
    rank: int
    num_workers: int
    learning_rate: tf.Tensor
    previous_learning_rate: tf.Tensor
    offset: int = 0
    second_moments: Vector | None = None
    prepared: dict[str, tf.Tensor] | None = None
    server_state: State = ()
    weights: tf.Tensor | None = None

    @classmethod
    def at_rate_one(
        cls, step: Any = 0, rank: Any = 0, num_workers: int = 1, seed: int = 0
    ) -> Context:
        """Returns a step whose learning rate is 1, like that of the step before it."""
        return cls(
            step=tf.cast(step, tf.int64),
            seed=tf.constant(seed, tf.int64),
            rank=rank,
            num_workers=num_workers,
            learning_rate=tf.constant(1.0),
            previous_learning_rate=tf.constant(1.0),
        )

    @property
    def learning_rate_ratio(self) -> tf.Tensor:
        """The previous step size over this one; 0 where this one is 0."""
        return tf.math.divide_no_nan(self.previous_learning_rate, self.learning_rate)

    @property
    def moves(self) -> tf.Tensor:
        """True if the step moves weights: its rate is neither 0 nor infinite or NaN."""
        rate = self.learning_rate
        return tf.math.is_finite(rate) & tf.not_equal(rate, 0)

    def at_server(self) -> Context:
        """Returns the step as the server sees it, the same wherever the server is."""
        return self._replace(rank=-1, prepared=None, server_state=())

    def unless_zero_lr(self, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        """Returns `new`, or `old` in a step that does not move weights (`moves`).

        Residuals are in units of the last learning rate that did. Another step must not
        change them.
        """
        # A `tf.where` would copy the vector.
        return tf.cond(self.moves, lambda: new, lambda: old)

    def random_stream(self, stream: int = 0, shared: bool = False) -> tf.Tensor:
        """Returns a stream of random bits: a pure function of seed, step and worker.

        The key is `seed`. The high half of the counter is
        `step * 2**24 + (rank + 1) * 2**4 + stream`, with 0 for `rank + 1` if the bits
        are `shared` by all workers. An element draws the same bits in a part of the
        vector as in the whole (`tfgradcomp.ops.reference.random_numbers`).

        Args:
            stream: 0 to 15, a different number for each use within a step.
            shared: Whether all workers draw the same bits.

        Returns:
            int64 `[3]`: the key, the high half of the counter, and the index of element
            0 in the whole vector over `DRAWN_TOGETHER`.
        """
        worker = 0 if shared else tf.cast(self.rank, tf.int64) + 1
        high = tf.cast(self.step, tf.int64) * 2**24 + worker * 2**4 + stream
        first = tf.constant(self.offset // DRAWN_TOGETHER, tf.int64)
        return tf.stack([tf.cast(self.seed, tf.int64), high, first])
