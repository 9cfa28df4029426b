"""The common part of the quantizers' wrappers: blocks, reply, error feedback."""

from __future__ import annotations

from typing import Any

from tfgradcomp.compressors import Clip, Compressor, ErrorFeedback, Fitted
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import Mean, Recompress, Requantize, Server

REPLIES = ("float32", "requantize")


class Quantizer(CompressedOptimizer):
    """Quantizes each block by itself; the server takes the mean.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        compressor: The quantizer, stateless.
        block_size: Elements a block. None: a block is a parameter tensor.
        reply: `"float32"`, or `"requantize"`: the mean by the same quantizer.
        error_feedback: Whether what is lost is added to the next gradient, and to the
            next mean where the reply is quantized. What does not contract by itself is
            `Fitted`, for a number a block.
        clip_factor: What workers clip blocks at, in deviations, or None.
        **kwargs: As `CompressedOptimizer`.
    """

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
        check_choice("reply", reply, REPLIES)
        check_choice("error_feedback", error_feedback, (False, True))
        sent = compressor if clip_factor is None else Clip(compressor, clip_factor)
        if error_feedback and not sent.contracts:
            sent, compressor = Fitted(sent), Fitted(compressor)
        server: Server = Mean(compressor)
        if reply == "requantize":
            server = (Recompress if error_feedback else Requantize)(compressor)
        if error_feedback:
            sent = ErrorFeedback(sent)
        super().__init__(inner_optimizer, sent, server, block_size=block_size, **kwargs)
        self.block_size = block_size
        self.reply = reply
        self.error_feedback = error_feedback
