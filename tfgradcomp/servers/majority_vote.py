"""Majority vote over signs."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Field
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

    References:
        Bernstein et al., signSGD, 2018, Algorithm 3.
    """

    tie: str = "zero"

    def __post_init__(self):
        if self.tie not in TIES:
            raise ValueError(f"tie must be one of {TIES}. Received: tie={self.tie!r}")

    def _has_zero(self, num_workers):
        return self.tie == "zero" and num_workers % 2 == 0

    def reply_fields(self, layout, num_workers):
        """See `Server.reply_fields`."""
        return {
            "votes": Field(layout.size, base=3 if self._has_zero(num_workers) else 2)
        }

    def combine(self, payloads, state, layout, context):
        """See `Server.combine`."""
        num_workers = payloads["codes"].shape[0]
        net = 2 * tf.reduce_sum(payloads["codes"], axis=0) - num_workers
        if self._has_zero(num_workers):
            return {"votes": tf.sign(net) + 1}, state
        votes = tf.cast(net > 0, tf.int32)
        if num_workers % 2 == 0:
            coin = context.random_bits(layout.size, stream=2, shared=True) % 2
            votes = tf.where(tf.equal(net, 0), tf.cast(coin, tf.int32), votes)
        return {"votes": votes}, state

    def decompress(self, reply, layout, num_workers):
        """See `Server.decompress`."""
        votes = reply["votes"]
        signs = votes - 1 if self._has_zero(num_workers) else 2 * votes - 1
        return tf.cast(signs, tf.float32)

    def uncompressed(self):
        """See `Server.uncompressed`."""
        return SignOfMean()
