"""The sign of the mean: a vote on vectors that were not compressed."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.servers.base import Mean


@dataclass(frozen=True)
class SignOfMean(Mean):
    r"""Replies \( \mathrm{sign}(\frac{1}{N} \sum_i \Delta^{(i)}) \)."""

    @override
    def combine(self, payloads, state, layout, context):
        reply, state = super().combine(payloads, state, layout, context)
        return {"values": tf.sign(reply["values"])}, state

    @override
    def uncompressed(self):
        return SignOfMean()
