"""Strom's compression."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp import compressors
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import Mean


class Strom(CompressedOptimizer):
    r"""A sign for each element whose sum is beyond a threshold, nothing for the others.

    Worker: \( r \mathrel{+}= g \). Where \( |r| > \tau \) it sends
    \( S = \mathrm{sign}(r)\,\tau \) and \( r \mathrel{-}= S \); nothing is lost, only
    late. Server: the mean; where nobody sent, zero.

    The learning rate is that of uncompressed training. `traffic.ratio` is the number
    of elements over those sent. XLA (`jit_compile=True`) is for one worker only.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        threshold: \( \tau \), positive, in the units of a mean gradient; or
            `"auto"`: in each step each worker takes, for each variable, the value that
            |r| of one element in 32 exceeds, so that nothing need be guessed.
            An element pays back one \( \tau \) a step, so a number should be about as
            large as what |r| is where it is sent: where it is far smaller, what is owed
            comes late, in many steps of one sign. `fit` warns once where that is so.
        index_coding: `"fixed"`: 32 bits an element. `"delta"`: 1 bit and the gap to
            the one before, less than half of that, for a little arithmetic.
        **kwargs: Those of `CompressedOptimizer` from `transport` on. `min_size` is 0,
            since small variables cost nothing extra.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        optimizer = tfgradcomp.Strom(keras.optimizers.SGD(0.1), threshold=0.01)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```

    References:
        Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
        2015.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "threshold",
        "index_coding",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        threshold: float | str,
        index_coding: str = "fixed",
        **kwargs: Any,
    ):
        compressor = compressors.Strom(threshold, index_coding)
        kwargs = {"min_size": 0, **kwargs}
        super().__init__(inner_optimizer, compressor, Mean(compressor), **kwargs)
        self.threshold = threshold
        self.index_coding = index_coding
