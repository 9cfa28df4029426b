"""Votes on uncompressed vectors: the sign of the mean, the mean of signs."""

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


@dataclass(frozen=True)
class MeanOfSigns(Mean):
    r"""Replies \( \frac{1}{N} \sum_i \mathrm{sign}(\Delta^{(i)}) \)."""

    @override
    def combine(self, payloads, state, layout, context):
        signs = {name: tf.sign(values) for name, values in payloads.items()}
        return super().combine(signs, state, layout, context)

    @override
    def sum_field(self, layout, num_workers):
        # The sum of the vectors does not determine the sum of their signs.
        return None

    @override
    def uncompressed(self):
        return MeanOfSigns()
