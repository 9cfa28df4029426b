"""Majority vote over signs."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.sign import Sign
from tfgradcomp.core import Field
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.servers.base import Server
from tfgradcomp.servers.code_sum import CodeSum
from tfgradcomp.servers.sign_of_mean import SignOfMean


@dataclass(frozen=True)
class MajorityVote(Server):
    r"""Replies \( \mathrm{sign}(\sum_i \mathrm{sign}^{(i)}) \), one vote a worker.

    Attributes:
        tie: Rule for a split vote of an even number of workers. `"zero"`: the element
            stays (the reply is base 3); `"random"`: a pseudo-random \( \pm 1 \), equal
            on all workers (base 2). With a fixed sign the element would drift.
        quorum: Least number of net votes, of either sign, that moves an element.
        compressor: The workers' compressor: `Sign()`, with or without abstention.

    References:
        Bernstein et al., signSGD, 2018, Algorithm 3 and Section 6.
    """

    tie: str = "zero"
    quorum: int = 0
    compressor: Sign = Sign()

    def __post_init__(self):
        check_choice("tie", self.tie, ("zero", "random"))
        if not self.quorum >= 0:
            raise ValueError(
                f"quorum must be 0 or positive. Received: quorum={self.quorum}"
            )

    def _can_tie(self, num_workers):
        return num_workers % 2 == 0 or self.compressor.abstain_below > 0

    def _stream(self, context):
        """Returns the random stream that decides split votes, or None."""
        if self.tie == "random" and self._can_tie(context.num_workers):
            return context.random_stream(2, shared=True)
        return None

    @override
    def reply_fields(self, layout, num_workers):
        has_zero = self.tie == "zero" and self._can_tie(num_workers)
        base = 3 if has_zero or self.quorum > 0 else 2
        return {"votes": Field(layout.size, base, per="element")}

    @override
    def combine(self, payloads, state, layout, context):
        num_workers = payloads["codes"].shape[0]
        votes = ops.majority_vote(
            payloads["codes"],
            layout.size,
            self.compressor.fields(layout)["codes"].base,
            self.reply_fields(layout, num_workers)["votes"].base,
            self.quorum,
            self._stream(context),
        )
        return {"votes": votes}, state

    @override
    def decompress(self, reply, layout, num_workers):
        base = self.reply_fields(layout, num_workers)["votes"].base
        return ops.sum_levels(
            reply["votes"][tf.newaxis],
            tf.ones([layout.num_blocks]),
            layout.row_splits,
            base,
            step=4 - base,
            zero=1,
            sizes=layout.sizes,
        )

    @override
    def sum_field(self, layout, num_workers):
        return CodeSum(self.compressor).sum_field(layout, num_workers)

    @override
    def update_of_sum(self, total, payload, state, layout, context):
        num_workers = context.num_workers
        net = ops.sum_levels(
            total[tf.newaxis],
            tf.ones([layout.num_blocks]),
            layout.row_splits,
            self.sum_field(layout, num_workers).field.base,
            step=self.compressor.step,
            zero=num_workers,
        )
        votes = tf.sign(net)
        stream = self._stream(context)
        if stream is not None:
            coins = 2 * ops.coins(stream, layout.size)
            votes = tf.where(tf.equal(net, 0), tf.cast(coins, tf.float32) - 1, votes)
        return tf.where(tf.abs(net) < self.quorum, 0.0, votes), state

    @override
    def uncompressed(self):
        return SignOfMean()
