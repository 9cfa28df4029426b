"""dist-EF-SGD, dist-EF-blockSGD and dist-EF-blockSGDM: two-way error feedback."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp import compressors
from tfgradcomp.assignment.compatibility import refuse_inner_momentum
from tfgradcomp.compressors import (
    Compressor,
    ErrorFeedback,
    NesterovMomentum,
    ScaledSign,
)
from tfgradcomp.compressors.optimal_scale import contracting
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import Recompress


class DistEFSGD(CompressedOptimizer):
    r"""Error feedback on the workers and on the server, with any compressor C.

    ```
    worker i:  p = g + (η_{t−1}/η_t)·e        push Δ = C(p)          e ← p − Δ
    server:    p̃ = mean_i Δ_i + (η_{t−1}/η_t)·ẽ   reply Δ̃ = C(p̃)      ẽ ← p̃ − Δ̃
    worker:    x ← x − η_t·Δ̃
    ```

    \( \eta \) is the inner optimizer's learning rate, schedules included. In a step
    with \( \eta_t = 0 \) residuals stay as they are. The learning rate is that of
    uncompressed training. What is owed would grow without bound if C did not contract:
    an unbiased compressor, such as `"ternary"`, is taken times the factor that fits
    each block best (`tfgradcomp.compressors.OptimalScale`).

    Args:
        inner_optimizer: A Keras optimizer, its name or its config; SGD is the paper's.
        compressor: C, a stateless `Compressor` or the short name of one, such as
            `"scaled_sign"` (one bit and a scale a block). The error of an unknown name
            lists all of them.
        weight_decay: \( \lambda \) of \( x \leftarrow x - \eta(\tilde\Delta + \lambda
            x) \), never compressed; or None.
        block_size: Elements a block. None: the whole model is one block.
        residual_dtype: What the residuals are kept in, on workers and server:
            `"float32"`, or `"bfloat16"`, half of the memory, rounded at random so that
            on average nothing is lost.
        **kwargs: Those of `CompressedOptimizer` from `transport` on.

    Raises:
        ValueError: If an argument is out of range or unknown.

    Example:
        ```python
        model.compile(tfgradcomp.DistEFSGD(keras.optimizers.SGD(0.05)), "mse")
        ```

    References:
        Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
        with Error-Feedback, 2019, Algorithm 2, Appendix A.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "compressor",
        "weight_decay",
        "block_size",
        "residual_dtype",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        compressor: str | Compressor = "scaled_sign",
        weight_decay: float | None = None,
        block_size: int | None = None,
        residual_dtype: str = "float32",
        **kwargs: Any,
    ):
        if block_size is not None:
            check_integer("block_size", block_size, 1)
        c = compressors.get(compressor)
        contraction = contracting(c)
        super().__init__(
            inner_optimizer,
            ErrorFeedback(contraction, residual_dtype=residual_dtype),
            Recompress(contraction, residual_dtype=residual_dtype),
            block_size="model" if block_size is None else block_size,
            weight_decay=None if weight_decay is None else WeightDecay(weight_decay),
            **kwargs,
        )
        self.compressor = c
        self.weight_decay = weight_decay
        self.residual_dtype = residual_dtype
        self.block_size = block_size


class DistEFBlockSGD(CompressedOptimizer):
    r"""dist-EF-SGD with a scale a block: one bit an element, up and down.

    \( C(v) = \frac{\|v_b\|_1}{d_b}\,\mathrm{sign}(v_b) \) on each block b of
    \( d_b \) elements; else as `DistEFSGD`.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config; SGD is the paper's.
        block_size: Elements a block. None: a block is a parameter tensor.
        weight_decay: As `DistEFSGD`.
        residual_dtype: As `DistEFSGD`.
        **kwargs: Those of `CompressedOptimizer` from `transport` on.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        model.compile(tfgradcomp.DistEFBlockSGD(keras.optimizers.SGD(0.05)), "mse")
        ```

    References:
        Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
        with Error-Feedback, 2019, Algorithm 3.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "block_size",
        "weight_decay",
        "residual_dtype",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        block_size: int | None = None,
        weight_decay: float | None = None,
        residual_dtype: str = "float32",
        **kwargs: Any,
    ):
        super().__init__(
            inner_optimizer,
            ErrorFeedback(ScaledSign(), residual_dtype=residual_dtype),
            Recompress(ScaledSign(), residual_dtype=residual_dtype),
            block_size=block_size,
            weight_decay=None if weight_decay is None else WeightDecay(weight_decay),
            **kwargs,
        )
        self.weight_decay = weight_decay
        self.residual_dtype = residual_dtype


class DistEFBlockSGDM(CompressedOptimizer):
    r"""dist-EF-blockSGD with Nesterov momentum on each worker.

    \( m \leftarrow \mu m + g \), \( p = \mu m + g + \frac{\eta_{t-1}}{\eta_t} e \); the
    rest as `DistEFBlockSGD`. The momentum is undamped, so the learning rate is that of
    SGD with Nesterov momentum. With weight decay, \( m' \leftarrow \mu m' + \lambda x
    \) and \( x \leftarrow x - \eta(\tilde\Delta + \mu m' + \lambda x) \).

    Args:
        inner_optimizer: A Keras optimizer without momentum, its name or its config.
        momentum: \( \mu \) in [0, 1).
        block_size: Elements a block. None: a block is a parameter tensor.
        weight_decay: \( \lambda \), or None.
        allow_inner_momentum: Whether the inner optimizer may have momentum of its own
            on top.
        residual_dtype: As `DistEFSGD`.
        **kwargs: Those of `CompressedOptimizer` from `transport` on.

    Raises:
        ValueError: If an argument is out of range, or the inner optimizer has
            momentum.

    Example:
        ```python
        model.compile(tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.01)), "mse")
        ```

    References:
        Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
        with Error-Feedback, 2019, Algorithm 4, Appendix A.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "momentum",
        "block_size",
        "weight_decay",
        "allow_inner_momentum",
        "residual_dtype",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        momentum: float = 0.9,
        block_size: int | None = None,
        weight_decay: float | None = None,
        allow_inner_momentum: bool = False,
        residual_dtype: str = "float32",
        **kwargs: Any,
    ):
        decay = None if weight_decay is None else WeightDecay(weight_decay, momentum)
        feedback = ErrorFeedback(ScaledSign(), residual_dtype=residual_dtype)
        super().__init__(
            inner_optimizer,
            NesterovMomentum(feedback, momentum),
            Recompress(ScaledSign(), residual_dtype=residual_dtype),
            block_size=block_size,
            weight_decay=decay,
            **kwargs,
        )
        if not allow_inner_momentum:
            refuse_inner_momentum(self)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.residual_dtype = residual_dtype
        self.allow_inner_momentum = allow_inner_momentum
