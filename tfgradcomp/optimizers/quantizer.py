"""The common part of the quantizers' wrappers: blocks, reply, error feedback."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from tfgradcomp.compressors import (
    AddableCodes,
    Clip,
    Compressor,
    ErrorFeedback,
    OptimalScale,
)
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import CodeSum, Mean, Recompress, Requantize, Server


class Quantizer(CompressedOptimizer):
    """Quantizes each block by itself; the server takes the mean.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        compressor: The quantizer, stateless.
        block_size: Elements a block. None: a block is a parameter tensor.
        reply: One of `replies`: `"float32"`; `"requantize"`, the mean by the same
            quantizer; `"shared"`, the sum of codes of levels that all workers share.
        error_feedback: Whether what is lost is added to the next gradient, and to the
            next mean where the reply is quantized. What does not contract by itself is
            `OptimalScale`, for a number a block.
        clip_factor: What workers clip blocks at, in deviations, or None.
        **kwargs: Those of `CompressedOptimizer` from `transport` on.
    """

    replies: ClassVar[tuple[str, ...]] = ("float32", "requantize")

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        compressor: Compressor,
        block_size: int | None,
        reply: str,
        error_feedback: bool,
        clip_factor: float | None = None,
        **kwargs: Any,
    ):
        if block_size is not None:
            check_integer("block_size", block_size, 1)
        check_choice("reply", reply, self.replies)
        check_choice("error_feedback", error_feedback, (False, True))
        if error_feedback and reply == "shared":
            raise ValueError(
                "The codes of reply='shared' are added up, and error feedback would "
                "need a factor of each worker's own. Take reply='requantize'. "
                f"Received: {reply=}, {error_feedback=}"
            )
        sent = compressor if clip_factor is None else Clip(compressor, clip_factor)
        if error_feedback and not sent.contracts:
            sent, compressor = OptimalScale(sent), OptimalScale(compressor)
        server: Server = Mean(compressor)
        if reply == "requantize":
            server = (Recompress if error_feedback else Requantize)(compressor)
        elif reply == "shared":
            server = CodeSum(cast(AddableCodes, compressor))
        if error_feedback:
            sent = ErrorFeedback(sent)
        super().__init__(inner_optimizer, sent, server, block_size=block_size, **kwargs)
        self.block_size = block_size
        self.reply = reply
        self.error_feedback = error_feedback
