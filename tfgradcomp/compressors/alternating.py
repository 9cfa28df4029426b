"""One factor a step: the compressor of ACP-SGD."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed
from tfgradcomp.compressors.low_rank import LowRank, Matrices
from tfgradcomp.core import Field
from tfgradcomp.ops.reference.vectors import zero_padded


@dataclass(frozen=True)
class AlternatingLowRank(LowRank):
    r"""Sends the left factor of each matrix in one step, and the right one in the next.

    Without a first round, the other factor is that of the step before, with orthonormal
    columns:

    \( P = \frac{1}{N} \sum_i M_i \hat Q \) for the product \( P \hat Q^\top \), then
    \( Q = \frac{1}{N} \sum_i M_i^\top \hat P \) for \( \hat P Q^\top \), and so on.

    A message has room for the longer ones of both, so a worker sends \( r \max(\sum n,
    \sum m) \) numbers for all matrices, and has half of the arithmetic of `LowRank`.
    Tensors that are no such matrices are sent as they are.

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
        longest = self.rank * max(map(sum, matrices.counts))
        return {
            "values": Field(matrices.others + longest),
            "basis": Field(longest, shared=True),
            # 1 where the left factors are sent.
            "is_left": Field(1, shared=True),
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
        longest = self.fields(layout)["basis"].count
        is_left = tf.equal(context.step % 2, 1)

        def compressed(left):
            name = "right" if left else "left"
            factors = self.first_factors(name, layout, context)
            rows = matrices.widths if left else matrices.heights
            basis = ops.orthonormalize(factors, rows, self.rank)
            if left:
                sent = ops.multiply_matrices(x, basis, *matrices, self.rank)
            else:
                values = ops.multiply_transposed(x, basis, *matrices, self.rank)
                sent, _ = matrices.split(values, self.rank)
            return zero_padded(sent, longest), zero_padded(basis, longest)

        values = matrices.others_of(x)
        basis = tf.zeros([0])
        if matrices.heights:
            sent, basis = tf.cond(
                is_left, lambda: compressed(True), lambda: compressed(False)
            )
            values = tf.concat([values, sent], 0)
        payload = {
            "values": values,
            "basis": basis,
            "is_left": tf.cast(is_left, tf.float32)[tf.newaxis],
        }
        return Compressed(payload, state)

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
        return {"left": self.rank * sum(left), "right": self.rank * sum(right)}

    @override
    def factors(self, payload, layout):
        matrices = Matrices.of(layout, self.rank)
        sent, basis = payload["values"][matrices.others :], payload["basis"]
        is_left = payload["is_left"][0] > 0
        pairs = {"left": (sent, basis), "right": (basis, sent)}
        return {
            name: tf.where(is_left, *pair)[: self.rank * sum(counts)]
            for (name, pair), counts in zip(pairs.items(), matrices.counts, strict=True)
        }
