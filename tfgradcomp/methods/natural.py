"""Natural compression: random rounding to powers of two."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.methods.method import Method
from tfgradcomp.methods.quantizer import quantizer


def natural_compression(
    block_size: int | None = 2048, reply: str = "float32", error_feedback: bool = False
) -> Method:
    r"""Random rounding to powers of two: eight bits an element, unbiased.

    Worker: an element with \( 2^a \le |v| < 2^{a+1} \) keeps its sign and becomes \(
    2^{a+1} \) with probability \( |v| / 2^a - 1 \), else \( 2^a \). Server: the mean.
    The variance of an element is at most \( v^2 / 8 \), whatever the others are, so
    gradients of very different sizes may share a block. The learning rate is that of
    uncompressed training.

    Args:
        block_size: Elements a block, for each of which a byte is sent as well. None: a
            block is a parameter tensor.
        reply: `"float32"`, or `"requantize"`: the mean rounded to powers of two again.
        error_feedback: As for `orq`; no factor is needed.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.natural_compression()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Horvath, Ho, Horvath, Sahu, Canini, Richtarik, Natural Compression for
        Distributed Deep Learning, 2019.
    """
    compressor = compressors.NaturalCompression()
    return quantizer(
        "NaturalCompression", compressor, block_size, reply, error_feedback
    )
