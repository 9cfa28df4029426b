"""TernGrad."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp.compressors import Clip, Compressor, Ternary
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import CodeSum, Mean, Server


class TernGrad(CompressedOptimizer):
    r"""Three levels an element: 1.6 bits up, \( \log_2(2N+1) \) bits down.

    Worker: \( f(g) \) clips each block to \( \pm c\sigma \); \( s \) is the largest
    magnitude in the block over all workers; then \( \tilde g = s \cdot
    \mathrm{sign}(f(g)) \circ b \) with \( P(b_k = 1) = |f(g)_k| / s \), which is
    \( f(g) \) on average. Server: \( \frac{s}{N} \sum_i code^{(i)} \), an integer sum.

    The learning rate is that of uncompressed training, or a little smaller: three
    levels add variance. Momentum, Adam and `use_ema` of the inner optimizer work as
    they do there.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        clip_factor: c; None for no clipping, which costs accuracy.
        block_size: Elements a block. None: a block is a parameter tensor.
        share_scaler: Whether s is the maximum over workers, which costs a small
            all-reduce. Else each worker has its own, and the reply is float32.
        **kwargs: Those of `CompressedOptimizer` from `transport` on. `exclude="last"`
            is the paper's advice for large models.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        optimizer = tfgradcomp.TernGrad(keras.optimizers.SGD(0.01, momentum=0.9))
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```

    References:
        Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce
        Communication in Distributed Deep Learning, 2017.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "clip_factor",
        "block_size",
        "share_scaler",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        clip_factor: float | None = 2.5,
        block_size: int | None = None,
        share_scaler: bool = True,
        **kwargs: Any,
    ):
        if block_size is not None:
            check_integer("block_size", block_size, 1)
        compressor: Compressor = Ternary(share_scaler)
        if clip_factor is not None:
            compressor = Clip(compressor, clip_factor)
        server: Server = CodeSum(Ternary()) if share_scaler else Mean(compressor)
        super().__init__(
            inner_optimizer, compressor, server, block_size=block_size, **kwargs
        )
        self.clip_factor = clip_factor
        self.block_size = block_size
        self.share_scaler = share_scaler
