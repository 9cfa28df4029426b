"""The mean of what the workers sent, in float32; and its sign."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Field
from tfgradcomp.compressors.identity import Identity
from tfgradcomp.servers.base import Server


@dataclass(frozen=True)
class Mean(Server):
    r"""Replies \( \frac{1}{N} \sum_i \Delta^{(i)} \), summed in the order of ranks.

    Attributes:
        compressor: The workers' compressor; its payloads are decoded by it.
    """

    compressor: Compressor = Identity()

    def reply_fields(self, layout, num_workers):
        """See `Server.reply_fields`."""
        return {"values": Field(layout.size, per="element")}

    def combine(self, payloads, state, layout, context):
        """See `Server.combine`."""
        return {"values": self.compressor.mean(payloads, layout)}, state

    def decompress(self, reply, layout, num_workers):
        """See `Server.decompress`."""
        return reply["values"]


@dataclass(frozen=True)
class SignOfMean(Mean):
    """Replies the sign of the mean: a vote on vectors that were not compressed."""

    def combine(self, payloads, state, layout, context):
        """See `Server.combine`."""
        reply, state = super().combine(payloads, state, layout, context)
        return {"values": tf.sign(reply["values"])}, state
