"""The integer sum of codes, as a reply with the levels of such a sum."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.uniform_levels import AddableCodes
from tfgradcomp.servers.base import Mean, Server, SumField
from tfgradcomp.servers.sign_of_mean import MeanOfSigns


@dataclass(frozen=True)
class CodeSum(Server):
    r"""Replies the integer sum of the workers' codes.

    N codes of base b add up to one of \( N(b - 1) + 1 \) levels: \( 2N + 1 \) for
    ternary codes. A scale must be equal on all workers.

    Attributes:
        compressor: The workers' compressor: `Ternary(share_scaler=True)`, `Sign()` or
            `QSGD(share_norm=True)`.

    References:
        Wen et al., TernGrad, 2017, Section 3.3.
    """

    compressor: AddableCodes

    @override
    def reply_fields(self, layout, num_workers):
        fields = dict(self.compressor.fields(layout))
        codes = fields["codes"]
        levels = num_workers * (codes.base - 1) + 1  # type: ignore[operator]
        return {**fields, "codes": codes._replace(base=levels)}

    @override
    def combine(self, payloads, state, layout, context):
        reply = {name: stacked[0] for name, stacked in payloads.items()}
        base = self.compressor.fields(layout)["codes"].base
        reply["codes"] = ops.sum_codes(payloads["codes"], base, layout.size)  # type: ignore[arg-type]
        return reply, state

    @override
    def update(self, payloads, state, layout, context):
        base = self.compressor.fields(layout)["codes"].base
        first = {name: stacked[0] for name, stacked in payloads.items()}
        vector = self.compressor.mean_of_codes(
            payloads["codes"], base, context.num_workers, first, layout
        )
        return vector, state

    @override
    def decompress(self, reply, layout, num_workers):
        base = self.reply_fields(layout, num_workers)["codes"].base
        return self.compressor.mean_of_codes(
            reply["codes"][tf.newaxis], base, num_workers, reply, layout
        )

    @override
    def sum_field(self, layout, num_workers):
        return SumField("codes", self.reply_fields(layout, num_workers)["codes"])

    @override
    def update_of_sum(self, total, payload, state, layout, context):
        reply = {**payload, "codes": total}
        return self.decompress(reply, layout, context.num_workers), state

    @override
    def uncompressed(self):
        return Mean() if self.compressor.is_scaled else MeanOfSigns()
