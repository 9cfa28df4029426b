"""Majority vote over signs."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Field
from tfgradcomp.compressors.sign import Sign
from tfgradcomp.servers.base import Server
from tfgradcomp.servers.mean import SignOfMean

TIES = ("zero", "random")


@dataclass(frozen=True)
class MajorityVote(Server):
    r"""Replies \( \mathrm{sign}(\sum_i \mathrm{sign}^{(i)}) \), one vote a worker.

    Attributes:
        tie: What an even number of workers does where the vote is split. `"zero"`:
            the element stays (the reply is base 3); `"random"`: a pseudo-random
            \( \pm 1 \), the same on all workers (base 2). A fixed sign would drift.
        quorum: Fewer net votes than this, either way, and the element stays.
        compressor: What the workers send: `Sign()`, with or without abstention.

    References:
        Bernstein et al., signSGD, 2018, Algorithm 3 and Section 6.
    """

    tie: str = "zero"
    quorum: int = 0
    compressor: Sign = Sign()

    def __post_init__(self):
        if self.tie not in TIES:
            raise ValueError(f"tie must be one of {TIES}. Received: tie={self.tie!r}")
        if not self.quorum >= 0:
            raise ValueError(
                f"quorum must be 0 or positive. Received: quorum={self.quorum}"
            )

    def _can_tie(self, num_workers):
        return num_workers % 2 == 0 or self.compressor.abstain_below > 0

    def _has_zero(self, num_workers):
        return self.quorum > 0 or (self.tie == "zero" and self._can_tie(num_workers))

    def reply_fields(self, layout, num_workers):
        """See `Server.reply_fields`."""
        return {
            "votes": Field(layout.size, base=3 if self._has_zero(num_workers) else 2)
        }

    def combine(self, payloads, state, layout, context):
        """See `Server.combine`."""
        num_workers = payloads["codes"].shape[0]
        total = tf.reduce_sum(payloads["codes"], axis=0)
        net = self.compressor.net_votes(total, num_workers)
        votes = tf.sign(net)
        if self.tie == "random" and self._can_tie(num_workers):
            coin = context.random_bits(layout.size, stream=2, shared=True) % 2
            votes = tf.where(tf.equal(net, 0), 2 * tf.cast(coin, tf.int32) - 1, votes)
        if self._has_zero(num_workers):
            votes = tf.where(tf.abs(net) < self.quorum, 0, votes)
            return {"votes": votes + 1}, state
        return {"votes": (votes + 1) // 2}, state

    def decompress(self, reply, layout, num_workers):
        """See `Server.decompress`."""
        votes = reply["votes"]
        signs = votes - 1 if self._has_zero(num_workers) else 2 * votes - 1
        return tf.cast(signs, tf.float32)

    def uncompressed(self):
        """See `Server.uncompressed`."""
        return SignOfMean()
