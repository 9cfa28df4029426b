"""One factor a step: the compressor of ACP-SGD."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed
from tfgradcomp.compressors.low_rank import LowRank, Matrices
from tfgradcomp.core import Context, Field
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
        matrices = Matrices.of(layout, self.rank)
        room = self.rank * sum(_longer(matrices))
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
        heights, widths = matrices.heights, matrices.widths
        turns, longer = self._turns(len(heights), context), _longer(matrices)
        nothing = tf.zeros([self.rank * sum(longer)])

        def left_factors():
            factors = self.first_factors("right", layout, context)
            basis = ops.orthonormalize(factors, widths, self.rank)
            sent = ops.multiply_matrices(x, basis, *matrices, self.rank)
            padded = self._padded(sent, heights, longer)
            return padded, self._padded(basis, widths, longer)

        def right_factors():
            factors = self.first_factors("left", layout, context)
            basis = ops.orthonormalize(factors, heights, self.rank)
            values = ops.multiply_transposed(x, basis, *matrices, self.rank)
            sent, _ = matrices.split(values, self.rank)
            padded = self._padded(sent, widths, longer)
            return padded, self._padded(basis, heights, longer)

        def if_any(is_turn, factors):
            return tf.cond(tf.reduce_any(is_turn), factors, lambda: (nothing, nothing))

        values, basis = matrices.others_of(x), tf.zeros([0])
        if longer:
            # All matrices have the same turn, if none has waited.
            left = if_any(turns > 0, left_factors)
            right = if_any(turns < 1, right_factors)
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
        matrices = Matrices.of(layout, self.rank)
        return {
            "left": self.rank * sum(matrices.heights),
            "right": self.rank * sum(matrices.widths),
            "turns": len(matrices.heights),
        }

    @override
    def factors(self, payload, layout):
        matrices = Matrices.of(layout, self.rank)
        longer = _longer(matrices)
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

    def _is_left(self, turns, longer):
        """Returns whether each number in the room of factors is of a left one."""
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


def _longer(matrices):
    """Returns the longer side of each matrix: a message has room for it."""
    return [*map(max, matrices.heights, matrices.widths)]
