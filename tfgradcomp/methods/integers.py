"""INT8 and INT4: integers of eight or four bits, with a scale a block."""

from __future__ import annotations

from dataclasses import replace

from tfgradcomp.methods.method import Method
from tfgradcomp.methods.qsgd import qsgd


def int8(
    block_size: int | None = 2048, reply: str = "float32", error_feedback: bool = False
) -> Method:
    r"""Integers from -127 to 127 times a scale a block: eight bits an element.

    Worker: the scale of a block is \( s = \max_j |v_j| / 127 \); \( v_j / s \) is
    rounded at random to one of the two integers beside it, without bias. Server: the
    mean. This is `qsgd(levels=255)`. Four codes share a word, so that an element takes
    8 bits, and a block a number of 32 bits. The learning rate is that of uncompressed
    training.

    Args:
        block_size: Elements a block. None: a block is a parameter tensor.
        reply: `"float32"`; `"requantize"`: the mean is rounded to integers as well; or
            `"shared"`: all workers share the largest scale, and their integers are
            added up.
        error_feedback: Whether a worker adds its rounding error to the next gradient.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.int8()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.Adam(), method
        )
        ```

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding, 2017, Section 4.
    """
    method = qsgd(255, block_size, reply=reply, error_feedback=error_feedback)
    return replace(method, name="Int8")


def int4(
    block_size: int | None = 2048, reply: str = "float32", error_feedback: bool = False
) -> Method:
    r"""Integers from -7 to 7 times a scale a block: four bits an element.

    As `int8`, with \( s = \max_j |v_j| / 7 \). This is `qsgd(levels=15)`; eight codes
    share a word.

    Args:
        block_size: As for `int8`; smaller blocks lose less.
        reply: As for `int8`.
        error_feedback: As for `int8`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.int4(block_size=512)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.Adam(), method
        )
        ```

    References:
        Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant
        Model Training, 2023, Section 3.3, rounds to the nearest integer instead.
    """
    method = qsgd(15, block_size, reply=reply, error_feedback=error_feedback)
    return replace(method, name="Int4")
