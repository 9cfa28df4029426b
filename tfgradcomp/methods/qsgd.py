"""The usual quantizers: QSGD, linear quantization and the scaled sign."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.methods.method import Method
from tfgradcomp.methods.quantizer import quantizer


def qsgd(
    levels: int = 9,
    block_size: int | None = 2048,
    norm: str = "max",
    reply: str = "float32",
    error_feedback: bool = False,
) -> Method:
    r"""Evenly spaced levels up to the norm of each block, unbiased.

    Worker: the s levels of a block are \( \|v\| (2k / (s - 1) - 1) \), \( k = 0 \ldots
    s - 1 \); v between two of them goes up with probability \( (v - b_{k-1}) / (b_k -
    b_{k-1}) \). Server: the mean. A worker sends \( \log_2 s \) bits an element and a
    number a block. The learning rate is that of uncompressed training.

    Args:
        levels: s, odd: 3, 5, ..., 257.
        block_size: Elements a block. None: a block is a parameter tensor.
        norm: `"max"`: the largest magnitude, or `"l2"`: the root of the sum of
            squares, which sends more zeros and has more variance.
        reply: `"float32"`; `"requantize"`: the mean rounded to its levels; or
            `"shared"`: all workers take the levels of the largest norm, so that codes
            are added up and the reply, \( \log_2(N(s - 1) + 1) \) bits an element, is
            the exact mean. That costs a small all-reduce and some variance.
        error_feedback: As for `orq`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.qsgd(levels=5)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding, 2017, Section 3.1; `"max"` as in Section 4.
    """
    compressor = compressors.QSGD(levels, norm, share_norm=reply == "shared")
    return quantizer(
        "QSGD", compressor, block_size, reply, error_feedback, can_share_levels=True
    )


def linear_quantization(
    levels: int = 9,
    block_size: int | None = 2048,
    reply: str = "float32",
    error_feedback: bool = False,
    table_dtype: str = "float32",
) -> Method:
    r"""Levels at evenly spaced quantiles of each block, unbiased: a baseline of ORQ's.

    Worker: level k of a block of n elements has the rank \( k (n - 1) / (s - 1)
    \); rounding, server and traffic are those of `orq`. All levels are used equally
    often, and the shape of the gradient suffers.

    Args:
        levels: s, from 2 to 257.
        block_size: Elements a block. None: a block is a parameter tensor.
        reply: As for `orq`.
        error_feedback: As for `orq`.
        table_dtype: As for `orq`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.linear_quantization()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Section 5 (Linear-s).
    """
    compressor = compressors.LinearQuantization(levels, table_dtype)
    return quantizer(
        "LinearQuantization", compressor, block_size, reply, error_feedback
    )


def scaled_sign(
    block_size: int | None = None, reply: str = "float32", error_feedback: bool = False
) -> Method:
    r"""The sign of each element times the mean magnitude of its block: one bit.

    Worker: \( \frac{\|v\|_1}{d}\,\mathrm{sign}(v) \) on each block of d elements.
    Server: the mean. The sign of a zero is plus. Biased: without error feedback it need
    not converge; with it and a quantized reply it is `dist_ef_block_sgd`.

    Args:
        block_size: d, elements a block. None: a block is a parameter tensor.
        reply: `"float32"`, or `"requantize"`: the scaled sign of the mean.
        error_feedback: As for `orq`; no factor is needed.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.scaled_sign()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Eq. 13.
    """
    compressor = compressors.ScaledSign()
    return quantizer("ScaledSign", compressor, block_size, reply, error_feedback)
