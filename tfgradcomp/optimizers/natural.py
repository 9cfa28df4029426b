"""Natural compression: random rounding to powers of two."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp import compressors
from tfgradcomp.optimizers.quantizer import Quantizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer


class NaturalCompression(Quantizer):
    r"""Random rounding to powers of two: eight bits an element, unbiased.

    Worker: an element with \( 2^a \le |v| < 2^{a+1} \) keeps its sign and becomes \(
    2^{a+1} \) with probability \( |v| / 2^a - 1 \), else \( 2^a \). Server: the mean.
    The variance of an element is at most \( v^2 / 8 \), whatever the others are, so
    gradients of very different sizes may share a block. The learning rate is that of
    uncompressed training.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        block_size: Elements a block, for each of which a byte is sent as well. None: a
            block is a parameter tensor.
        reply: `"float32"`, or `"requantize"`: the mean rounded to powers of two again.
        error_feedback: Whether a worker adds what it lost to its next gradient; with a
            quantized reply the server does so, too.
        **kwargs: Those of `CompressedOptimizer` from `transport` on. Codes of different
            exponents cannot be added up, so there is no transport `"all_reduce"`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        optimizer = tfgradcomp.NaturalCompression(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
        ```

    References:
        Horvath, Ho, Horvath, Sahu, Canini, Richtarik, Natural Compression for
        Distributed Deep Learning, 2019.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "block_size",
        "reply",
        "error_feedback",
        *Quantizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        block_size: int | None = 2048,
        reply: str = "float32",
        error_feedback: bool = False,
        **kwargs: Any,
    ):
        compressor = compressors.NaturalCompression()
        super().__init__(
            inner_optimizer, compressor, block_size, reply, error_feedback, **kwargs
        )
