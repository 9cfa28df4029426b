"""The common part of the quantizers: blocks, reply, error feedback."""

from __future__ import annotations

from typing import cast

from tfgradcomp.compressors import (
    AddableCodes,
    Clip,
    Compressor,
    ErrorFeedback,
    OptimalScale,
)
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import CodeSum, Mean, Recompress, Requantize, Server


def quantizer(
    name: str,
    compressor: Compressor,
    block_size: int | None,
    reply: str,
    error_feedback: bool,
    clip_factor: float | None = None,
    can_share_levels: bool = False,
) -> Method:
    """Returns the method that quantizes each block and replies the mean.

    The arguments are those of `orq` and `qsgd`. With error feedback, a quantizer that
    does not contract becomes an `OptimalScale`, for a number a block.

    Args:
        name: Name of the method.
        compressor: The quantizer, stateless.
        block_size: Elements a block.
        reply: `"float32"`, `"requantize"` or `"shared"`.
        error_feedback: Whether a worker adds its error to the next gradient.
        clip_factor: Workers clip blocks at this many deviations; None for no clipping.
        can_share_levels: Whether `reply` may be `"shared"`.
    """
    if block_size is not None:
        check_integer("block_size", block_size, 1)
    shared = ("shared",) if can_share_levels else ()
    check_choice("reply", reply, ("float32", "requantize", *shared))
    check_choice("error_feedback", error_feedback, (False, True))
    if error_feedback and reply == "shared":
        raise ValueError(
            "The codes of reply='shared' are added up, and error feedback would "
            "need a different factor for each worker. Take reply='requantize'. "
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
    return Method(sent, server, block_size=block_size, name=name)
