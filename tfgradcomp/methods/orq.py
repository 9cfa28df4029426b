"""ORQ and BinGrad: levels that minimise the quantization error of each block."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.methods.method import Method
from tfgradcomp.methods.quantizer import quantizer


def orq(
    levels: int = 9,
    block_size: int | None = 2048,
    clip_factor: float | None = None,
    refine: int = 0,
    reply: str = "float32",
    error_feedback: bool = False,
    table_dtype: str = "float32",
) -> Method:
    r"""\( s = 2^K + 1 \) levels an element, chosen for each block anew, unbiased.

    Worker: of each block of d elements the levels \( b_1 < \dots < b_s \) from its
    smallest to its largest element, where the middle of \( b_l \) and \( b_r \) is
    the m-th largest element between them, \( m = \lceil \sum_j (v_j - b_l) / (b_r -
    b_l) \rceil \); v between two levels goes up with probability \( (v - b_{k-1}) /
    (b_k - b_{k-1}) \). Server: the mean of the decoded vectors.

    A worker sends \( \log_2 s \) bits an element (s = 3, 5, 9: 1.6, 2.5, 3.2) and
    \( 32 s / d \) for its levels. The learning rate is that of uncompressed training.

    Args:
        levels: s: 3, 5, 9, ..., 257.
        block_size: d, elements a block. None: a block is a parameter tensor.
        clip_factor: c: each block is clipped to \( \pm c\sigma \) first; the paper
            takes 1.7 or 2.5 for few levels. None for no clipping.
        refine: Sweeps that move every level to its best place between its neighbours.
            Without sweeps, the error of 9 levels is 1 to 4 % above the least error.
        reply: `"float32"`, or `"requantize"`: the mean, rounded at random to s
            levels again.
        error_feedback: Whether a worker adds what it lost to its next gradient; with a
            quantized reply the server does so, too. Each block is then multiplied by
            the factor that fits it best (`tfgradcomp.compressors.OptimalScale`): the
            rounding error may be larger than the gradient and would accumulate. The
            inner optimizer must not have momentum then.
        table_dtype: Type of the levels that travel: `"float32"`, `"bfloat16"`, or
            `"float16"`, in which a step with elements beyond \( \pm 65504 \) counts as
            not finite.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.orq(levels=5)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Eq. 7 and 12, Algorithms 1
        and 2. Clipping: Wen et al., TernGrad, 2017, Eq. 21.
    """
    compressor = compressors.ORQ(levels, refine, table_dtype)
    return quantizer(
        "ORQ", compressor, block_size, reply, error_feedback, clip_factor=clip_factor
    )


def bingrad(
    variant: str = "b",
    block_size: int | None = 2048,
    clip_factor: float | None = None,
    reply: str = "float32",
    error_feedback: bool = False,
    table_dtype: str = "float32",
    lloyd_steps: int = 0,
) -> Method:
    r"""Two levels an element, chosen for each block anew: one bit.

    `"b"`: \( b_0 \) is the mean of a block, \( b_{-1} \) the mean of the elements below
    it, \( b_1 \) that of the others; each element becomes the mean of its side. Small
    error, some bias: the paper's choice for one machine.

    `"pb"`: levels \( \pm b_1 \) with \( n b_1 = \sum_{|v| \ge b_1} |v| \) over the n
    elements; random rounding between them, without bias, and the nearest outside. Less
    bias, more error, which the mean over workers reduces.

    A worker sends one bit an element and two numbers a block. The learning rate is
    that of uncompressed training.

    Args:
        variant: `"b"` or `"pb"`.
        block_size: Elements a block. None: a block is a parameter tensor.
        clip_factor: As for `orq`.
        reply: As for `orq`.
        error_feedback: As for `orq`; variant `"b"` without clipping needs no factor.
        table_dtype: As for `orq`.
        lloyd_steps: Number of times that the two levels of `"b"` move to the means of
            the elements nearer to each. With 0, a block in six has more error than
            with the scaled sign.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.bingrad()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Xu, Huo, Huang, Optimal Gradient Quantization Condition for
        Communication-Efficient Distributed Training, 2019, Eq. 14 to 17, Algorithm 2.
    """
    compressor = compressors.BinGrad(variant, table_dtype, lloyd_steps)
    return quantizer(
        "BinGrad",
        compressor,
        block_size,
        reply,
        error_feedback,
        clip_factor=clip_factor,
    )
