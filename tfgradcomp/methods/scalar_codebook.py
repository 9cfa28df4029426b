"""Scalar codebooks: two to four bits an element, under two-way error feedback."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.methods.method import Method
from tfgradcomp.methods.quantizer import quantizer


def scalar_codebook(
    bits: int = 2,
    block_size: int | None = 2048,
    reply: str = "requantize",
    error_feedback: bool = True,
) -> Method:
    r"""The nearest of \( 2^b \) levels that fit a normal law, with a scale a block.

    Worker: \( p = g + \frac{\eta_{t-1}}{\eta_t} e \); each element of a block becomes
    the nearest level \( \pm\sigma b_k \), where \( b_k \) are the best levels for a
    standard normal law and \( \sigma = \sqrt{\pi/2} \) times the block's mean
    magnitude; \( e \leftarrow p - C(p) \). Server: the same with the mean and a
    residual of its own.

    For normal elements the square error is 0.363, 0.1175, 0.0345 and 0.0095 of that of
    sending nothing, with 1 to 4 bits. Rounding without bias to as many levels has about
    three times as much; error feedback needs no such rounding.

    Elements beyond the largest level wait, at least in part, in the residual. Strong
    momentum goes on with what comes late: take an inner SGD with little or none.

    Args:
        bits: b, 1 to 4: an element takes 1, 2, 3.2 or 4 bits, in each direction.
        block_size: Elements a block, which has a number of 32 bits. None: a block is a
            parameter tensor.
        reply: `"requantize"`: the mean is rounded as well; or `"float32"`.
        error_feedback: Whether what rounding loses is added to the next gradient, on
            workers and on a server that rounds. Without, small elements are lost.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.scalar_codebook(bits=3)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Lloyd, Least Squares Quantization in PCM, 1982. Two-way error feedback: Zheng,
        Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Algorithm 2.
    """
    compressor = compressors.ScalarCodebook(bits)
    return quantizer("ScalarCodebook", compressor, block_size, reply, error_feedback)
