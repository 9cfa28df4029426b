"""One factor a step: the compressor of ACP-SGD."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed
from tfgradcomp.compressors.low_rank import LowRank, Matrices
from tfgradcomp.core import Context, Field, Layout
from tfgradcomp.ops.reference.vectors import zero_padded


@dataclass(frozen=True)
class AlternatingLowRank(LowRank):
    r"""Sends one factor of each matrix, and the other one in its next step.

    Without a first round, the other factor is that of the step before, with orthonormal
    columns:

    \( P = \frac{1}{N} \sum_i M_i \hat Q \) for the product \( P \hat Q^\top \), then
    \( Q = \frac{1}{N} \sum_i M_i^\top \hat P \) for \( \hat P Q^\top \), and so on.

    A message has room for the longer ones of both, so a worker sends \( r \sum \max(n,
    m) \) numbers for all matrices, and has half of the arithmetic of `LowRank`. Tensors
    that are no such matrices are sent as they are. With `FactorMean`, the turn of a
    matrix waits while it has no gradient.

    Attributes:
        rank: r.

    Example:
        ```python
        method = tfgradcomp.methods.power_sgd(rank=4, alternate=True)
        ```

    References:
        Zhang, Zhang, Shi, Chu, Li, Evaluation and Optimization of Gradient Compression
        for Distributed Deep Learning, 2023, Section IV: ACP-SGD.
    """

    @override
    def fields(self, layout):
        room = self.rank * sum(self._longer(layout))
        matrices = Matrices.of(layout, self.rank)
        return {
            "values": Field(matrices.others + room),
            "basis": Field(room, shared=True),
            # 1 for matrices whose left factors are sent.
            "turns": Field(len(matrices.heights), shared=True),
        }

    @override
    def mean_reduced_fields(self, layout):
        return {}

    @override
    def prepare(self, x, state, layout, context):
        return {}

    @override
    def compress(self, x, state, layout, context):
        matrices = Matrices.of(layout, self.rank)
        turns = self._turns(len(matrices.heights), context)
        longer = self._longer(layout)
        room = self.rank * sum(longer)

        def compressed(left):
            name, rows, others = "right", matrices.widths, matrices.heights
            if not left:
                name, rows, others = "left", others, rows
            factors = self.first_factors(name, layout, context)
            basis = ops.orthonormalize(factors, rows, self.rank)
            if left:
                sent = ops.multiply_matrices(x, basis, *matrices, self.rank)
            else:
                values = ops.multiply_transposed(x, basis, *matrices, self.rank)
                sent, _ = matrices.split(values, self.rank)
            return self._padded(sent, others, longer), self._padded(basis, rows, longer)

        def nothing():
            return tf.zeros([room]), tf.zeros([room])

        values, basis = matrices.others_of(x), tf.zeros([0])
        if longer:
            # All matrices have the same turn, if none has waited.
            left = tf.cond(tf.reduce_any(turns > 0), lambda: compressed(True), nothing)
            right = tf.cond(
                tf.reduce_any(turns < 1), lambda: compressed(False), nothing
            )
            is_left = self._is_left(turns, longer)
            sent, basis = (tf.where(is_left, *p) for p in zip(left, right, strict=True))
            values = tf.concat([values, sent], 0)
        return Compressed({"values": values, "basis": basis, "turns": turns}, state)

    @override
    def decompress(self, payload, layout):
        matrices = Matrices.of(layout, self.rank)
        others = payload["values"][: matrices.others]
        if not matrices.heights:
            return others
        factors = self.factors(payload, layout)
        values = matrices.joined(factors["right"], others, self.rank)
        return ops.multiply_factors(
            factors["left"], values, *matrices, self.rank, layout.sizes
        )

    @override
    def kept(self, layout):
        left, right = Matrices.of(layout, self.rank).counts
        sizes = {"left": self.rank * sum(left), "right": self.rank * sum(right)}
        return {**sizes, "turns": len(Matrices.of(layout, self.rank).heights)}

    @override
    def factors(self, payload, layout):
        matrices, longer = Matrices.of(layout, self.rank), self._longer(layout)
        sent, basis = payload["values"][matrices.others :], payload["basis"]
        is_left = self._is_left(payload["turns"], longer)
        left = tf.where(is_left, sent, basis)
        right = tf.where(is_left, basis, sent)
        return {
            "left": self._cut(left, matrices.heights, longer),
            "right": self._cut(right, matrices.widths, longer),
            "turns": 1 - payload["turns"],
        }

    def _turns(self, count: int, context: Context) -> tf.Tensor:
        """Returns 1 for matrices whose left factors are sent in this step."""
        if context.server_state:
            return context.server_state["turns"]
        # The bases are drawn anew in each step.
        return tf.repeat(tf.cast(context.step % 2, tf.float32), count)

    def _longer(self, layout: Layout) -> list[int]:
        """Returns the longer side of each matrix: a message has room for it."""
        matrices = Matrices.of(layout, self.rank)
        return [*map(max, matrices.heights, matrices.widths)]

    def _is_left(self, turns, longer):
        of_matrix = np.repeat(np.arange(len(longer)), longer)
        return tf.repeat(tf.gather(turns > 0, of_matrix), self.rank)

    def _padded(self, factors, rows, longer):
        """Returns factors with zeros behind each, up to its room."""
        parts = tf.split(factors, [self.rank * count for count in rows])
        return tf.concat(
            [
                zero_padded(part, self.rank * room)
                for part, room in zip(parts, longer, strict=True)
            ],
            0,
        )

    def _cut(self, padded, rows, longer):
        """Returns the factors that `_padded` has padded."""
        if not longer:
            return padded
        parts = tf.split(padded, [self.rank * room for room in longer])
        ends = [self.rank * count for count in rows]
        cut = [part[:end] for part, end in zip(parts, ends, strict=True)]
        return tf.concat(cut, 0)
