"""The usual quantizers: QSGD, linear quantization and the scaled sign."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp import compressors
from tfgradcomp.optimizers.quantizer import Quantizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer


class QSGD(Quantizer):
    r"""Evenly spaced levels up to the norm of each block, unbiased.

    Worker: the s levels of a block are \( \|v\| (2k / (s - 1) - 1) \), \( k = 0 \ldots
    s - 1 \); v between two of them goes up with probability \( (v - b_{k-1}) / (b_k -
    b_{k-1}) \). Server: the mean. A worker sends \( \log_2 s \) bits an element and one
    number a block. The learning rate is that of uncompressed training.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        levels: s, odd: 3, 5, ..., 257.
        block_size: Elements a block. None: a block is a parameter tensor.
        norm: `"max"`: the largest magnitude, or `"l2"`: the root of the sum of
            squares, which sends more zeros and has more variance.
        reply: `"float32"`; `"requantize"`: the mean rounded to levels of its own; or
            `"shared"`: all workers take the levels of the largest norm, so that codes
            are added up and the reply, \( \log_2(N(s - 1) + 1) \) bits an element, is
            the exact mean. That costs a small all-reduce and some variance.
        error_feedback: As `ORQ`.
        **kwargs: Those of `CompressedOptimizer` from `transport` on. Codes of different
            norms cannot be added up, so that transport `"all_reduce"` needs
            `reply="shared"`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        model.compile(tfgradcomp.QSGD(keras.optimizers.SGD(0.1), levels=5), "mse")
        ```

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding, 2017, Section 3.1; `"max"` as in Section 4.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "levels",
        "block_size",
        "norm",
        "reply",
        "error_feedback",
        *Quantizer.common_arguments,
    )
    replies = (*Quantizer.replies, "shared")

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        levels: int = 9,
        block_size: int | None = 2048,
        norm: str = "max",
        reply: str = "float32",
        error_feedback: bool = False,
        **kwargs: Any,
    ):
        compressor = compressors.QSGD(levels, norm, reply == "shared")
        super().__init__(
            inner_optimizer, compressor, block_size, reply, error_feedback, **kwargs
        )
        self.levels = levels
        self.norm = norm


class LinearQuantization(Quantizer):
    r"""Levels at evenly spaced quantiles of each block, unbiased: a baseline of ORQ's.

    Worker: level k of a block of n elements is the one of rank \( k (n - 1) / (s - 1)
    \); rounding, server and traffic are those of `ORQ`. All levels are used equally
    often, and the shape of the gradient suffers.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        levels: s, from 2 to 257.
        block_size: Elements a block. None: a block is a parameter tensor.
        reply: As `ORQ`.
        error_feedback: As `ORQ`.
        table_dtype: As `ORQ`.
        **kwargs: As `ORQ`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        optimizer = tfgradcomp.LinearQuantization(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Section 5 (Linear-s).
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "levels",
        "block_size",
        "reply",
        "error_feedback",
        "table_dtype",
        *Quantizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        levels: int = 9,
        block_size: int | None = 2048,
        reply: str = "float32",
        error_feedback: bool = False,
        table_dtype: str = "float32",
        **kwargs: Any,
    ):
        compressor = compressors.LinearQuantization(levels, table_dtype)
        super().__init__(
            inner_optimizer, compressor, block_size, reply, error_feedback, **kwargs
        )
        self.levels = levels
        self.table_dtype = table_dtype


class ScaledSign(Quantizer):
    r"""The sign of each element times the mean magnitude of its block: one bit.

    Worker: \( \frac{\|v\|_1}{d}\,\mathrm{sign}(v) \) on each block of d elements.
    Server: the mean. The sign of a zero is plus. Biased: without error feedback it need
    not converge; with it and a quantized reply it is `DistEFBlockSGD`.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        block_size: d, elements a block. None: a block is a parameter tensor.
        reply: `"float32"`, or `"requantize"`: the scaled sign of the mean.
        error_feedback: Whether a worker adds what it lost to its next gradient; with a
            quantized reply the server does so, too.
        **kwargs: As `QSGD`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        model.compile(tfgradcomp.ScaledSign(keras.optimizers.SGD(0.05)), "mse")
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Eq. 13.
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
        block_size: int | None = None,
        reply: str = "float32",
        error_feedback: bool = False,
        **kwargs: Any,
    ):
        compressor = compressors.ScaledSign()
        super().__init__(
            inner_optimizer, compressor, block_size, reply, error_feedback, **kwargs
        )
