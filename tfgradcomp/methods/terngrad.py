"""TernGrad: three levels an element, unbiased."""

from __future__ import annotations

from tfgradcomp.compressors import Clip, Compressor, Ternary
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import CodeSum, Mean, Server


def terngrad(
    clip_factor: float | None = 2.5,
    block_size: int | None = None,
    share_scaler: bool = True,
) -> Method:
    r"""Three levels an element: 1.6 bits up, \( \log_2(2N+1) \) bits down.

    Worker: \( f(g) \) clips each block to \( \pm c\sigma \); \( s \) is the largest
    magnitude in the block over all workers; then \( \tilde g = s \cdot
    \mathrm{sign}(f(g)) \circ b \) with \( P(b_k = 1) = |f(g)_k| / s \), which is
    \( f(g) \) on average. Server: \( \frac{s}{N} \sum_i code^{(i)} \), an integer sum.

    The learning rate is that of uncompressed training, or a little smaller: three
    levels add variance. Momentum, Adam and `use_ema` of the inner optimizer work as
    they do there.

    Args:
        clip_factor: c; None for no clipping, which costs accuracy.
        block_size: Elements a block. None: a block is a parameter tensor.
        share_scaler: Whether s is the maximum over workers, which costs a small
            all-reduce. Else scales differ between workers, and the reply is float32.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.terngrad()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.01), method
        )
        ```

    References:
        Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce
        Communication in Distributed Deep Learning, 2017.
    """
    if block_size is not None:
        check_integer("block_size", block_size, 1)
    compressor: Compressor = Ternary(share_scaler)
    if clip_factor is not None:
        compressor = Clip(compressor, clip_factor)
    server: Server = CodeSum(Ternary()) if share_scaler else Mean(compressor)
    return Method(compressor, server, block_size=block_size, name="TernGrad")
