"""dist-EF-SGD, dist-EF-blockSGD and dist-EF-blockSGDM: two-way error feedback."""

from __future__ import annotations

from dataclasses import replace

from tfgradcomp import compressors
from tfgradcomp.compressors import (
    Compressor,
    ErrorFeedback,
    NesterovMomentum,
    ScaledSign,
)
from tfgradcomp.compressors.optimal_scale import contracting
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Recompress


def dist_ef_sgd(
    compressor: str | Compressor = "scaled_sign",
    weight_decay: float | None = None,
    block_size: int | None = None,
    residual_dtype: str = "float32",
) -> Method:
    r"""Error feedback on the workers and on the server, with any compressor C.

    ```
    worker i:  p = g + (η_{t−1}/η_t)·e        push Δ = C(p)          e ← p − Δ
    server:    p̃ = mean_i Δ_i + (η_{t−1}/η_t)·ẽ   reply Δ̃ = C(p̃)      ẽ ← p̃ − Δ̃
    worker:    x ← x − η_t·Δ̃
    ```

    \( \eta \) is the inner optimizer's learning rate, schedules included. In a step
    with \( \eta_t = 0 \) residuals stay as they are. The learning rate is that of
    uncompressed training. The residual would grow without bound if C did not contract,
    so an unbiased compressor, such as `"ternary"`, is multiplied by the factor that
    fits each block best (`tfgradcomp.compressors.OptimalScale`). The inner optimizer
    must not have momentum, which would go on with residuals that have waited:
    `dist_ef_block_sgdm` has a momentum on each worker.

    Args:
        compressor: C, a stateless `Compressor` or the short name of one, such as
            `"scaled_sign"` (one bit and a scale a block). The error of an unknown name
            lists all of them.
        weight_decay: \( \lambda \) of \( x \leftarrow x - \eta(\tilde\Delta + \lambda
            x) \), never compressed; or None.
        block_size: Elements a block. None: the whole model is one block.
        residual_dtype: Type of the residuals, on workers and server:
            `"float32"`, or `"bfloat16"`, half of the memory, rounded at random so that
            on average nothing is lost.

    Raises:
        ValueError: If an argument is out of range or unknown.

    Example:
        ```python
        method = tfgradcomp.methods.dist_ef_sgd()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
        with Error-Feedback, 2019, Algorithm 2, Appendix A.
    """
    if block_size is not None:
        check_integer("block_size", block_size, 1)
    contraction = contracting(compressors.get(compressor))
    return Method(
        ErrorFeedback(contraction, residual_dtype=residual_dtype),
        Recompress(contraction, residual_dtype=residual_dtype),
        weight_decay=_decay(weight_decay),
        block_size="model" if block_size is None else block_size,
        name="DistEFSGD",
    )


def dist_ef_block_sgd(
    block_size: int | None = None,
    weight_decay: float | None = None,
    residual_dtype: str = "float32",
) -> Method:
    r"""dist-EF-SGD with a scale a block: one bit an element, up and down.

    \( C(v) = \frac{\|v_b\|_1}{d_b}\,\mathrm{sign}(v_b) \) on each block b of
    \( d_b \) elements; else as for `dist_ef_sgd`.

    Args:
        block_size: Elements a block. None: a block is a parameter tensor.
        weight_decay: As for `dist_ef_sgd`.
        residual_dtype: As for `dist_ef_sgd`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.dist_ef_block_sgd()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
        with Error-Feedback, 2019, Algorithm 3.
    """
    return Method(
        ErrorFeedback(ScaledSign(), residual_dtype=residual_dtype),
        Recompress(ScaledSign(), residual_dtype=residual_dtype),
        weight_decay=_decay(weight_decay),
        block_size=block_size,
        name="DistEFBlockSGD",
    )


def dist_ef_block_sgdm(
    momentum: float = 0.9,
    block_size: int | None = None,
    weight_decay: float | None = None,
    residual_dtype: str = "float32",
) -> Method:
    r"""dist-EF-blockSGD with Nesterov momentum on each worker.

    \( m \leftarrow \mu m + g \), \( p = \mu m + g + \frac{\eta_{t-1}}{\eta_t} e \); the
    rest as for `dist_ef_block_sgd`. The momentum is undamped, so the learning rate is
    that of SGD with Nesterov momentum. With weight decay,
    \( m' \leftarrow \mu m' + \lambda x \) and
    \( x \leftarrow x - \eta(\tilde\Delta + \mu m' + \lambda x) \).

    Args:
        momentum: \( \mu \) in [0, 1).
        block_size: Elements a block. None: a block is a parameter tensor.
        weight_decay: \( \lambda \), or None.
        residual_dtype: As for `dist_ef_sgd`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.dist_ef_block_sgdm()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.01), method
        )
        ```

    References:
        Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
        with Error-Feedback, 2019, Algorithm 4, Appendix A.
    """
    plain = dist_ef_block_sgd(block_size, residual_dtype=residual_dtype)
    return replace(
        plain,
        compressor=NesterovMomentum(plain.compressor, momentum),
        weight_decay=_decay(weight_decay, momentum),
        refuses_inner_momentum=True,
        name="DistEFBlockSGDM",
    )


def _decay(rate: float | None, momentum: float = 0.0) -> WeightDecay | None:
    return None if rate is None else WeightDecay(rate, momentum)
