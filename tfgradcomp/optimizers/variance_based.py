"""Variance-based compression, and the hybrid of it and Strom's."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp import compressors
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import Mean


class VarianceBased(CompressedOptimizer):
    r"""A word for each element whose sign is beyond doubt, nothing for the others.

    Worker: \( r \mathrel{+}= \sum_z g_z \), \( v \mathrel{+}= \sum_z g_z^2 \) over its
    examples z, where \( \sum_z g_z \) is its mean gradient. Where \( r^2 > \alpha v \)
    it sends r, rounded to a power of two, and both start again at zero; elsewhere r
    waits, and \( v \leftarrow \zeta v \). Server: the mean; where nobody sent, zero,
    which the inner optimizer takes for the gradient.

    The learning rate is that of uncompressed training. `traffic.ratio` is the paper's
    compression ratio. XLA (`jit_compile=True`) is for one worker only.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        alpha: \( \alpha \), 1 to 2: the larger, the less is sent, the later.
        zeta: \( \zeta \) in [0, 1], the decay of v.
        microbatches: Number of groups of examples, at least 2, whose gradients stand
            for those of the examples: less memory and time, and less is known. None:
            each example by itself.
        index_coding: `"fixed"`: 32 bits an element. `"delta"`: 4 bits and the gap to
            the one before, about half of that, for a little arithmetic.
        **kwargs: Those of `CompressedOptimizer` from `transport` on. `min_size` is 0,
            since small variables cost nothing extra.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        optimizer = tfgradcomp.VarianceBased(keras.optimizers.Adam())
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Figure 1.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "alpha",
        "zeta",
        "microbatches",
        "index_coding",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        alpha: float = 1.5,
        zeta: float = 0.999,
        microbatches: int | None = None,
        index_coding: str = "fixed",
        **kwargs: Any,
    ):
        check_microbatches(microbatches)
        compressor = compressors.VarianceBased(alpha, zeta, index_coding)
        kwargs = {"min_size": 0, **kwargs}
        super().__init__(inner_optimizer, compressor, Mean(compressor), **kwargs)
        self.alpha = alpha
        self.zeta = zeta
        self.microbatches = microbatches
        self.index_coding = index_coding


class Hybrid(CompressedOptimizer):
    r"""A sign for each element that is beyond a threshold, and beyond doubt.

    Worker: \( r \mathrel{+}= \sum_z g_z \), \( v \mathrel{+}= \sum_z g_z^2 \) over its
    examples z, where \( \sum_z g_z \) is its mean gradient. Where \( |r| > \tau \) and
    \( r^2 > \alpha v \) it sends \( S = \mathrm{sign}(r)\,\tau \),
    \( v \leftarrow \max(v - 2|r|\tau + \tau^2, 0) \) and \( r \mathrel{-}= S \). Then
    \( v \leftarrow \zeta v \). Server: the mean.

    The learning rate is that of uncompressed training. `traffic.ratio` is the paper's
    compression ratio. XLA (`jit_compile=True`) is for one worker only.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        threshold: \( \tau \), positive, in the units of a mean gradient; or
            `"auto"`: in each step each worker takes, for each variable, the value with
            which its signs take most from the squares of what is owed and not
            ambiguous. Take `"auto"` with momentum SGD inside: r outgrows a number while
            an element waits, and is then paid back late. In docs/studies/sparse.md
            numbers that `Strom` bore lost several points more than `"auto"` there, and
            sent several times as much.
        alpha: As `VarianceBased`.
        zeta: As `VarianceBased`.
        microbatches: As `VarianceBased`.
        index_coding: As `VarianceBased`, with 1 bit instead of 4.
        **kwargs: Those of `CompressedOptimizer` from `transport` on. `min_size` is 0,
            since small variables cost nothing extra.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        optimizer = tfgradcomp.Hybrid(keras.optimizers.Adam(), threshold="auto")
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Figure 2.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "threshold",
        "alpha",
        "zeta",
        "microbatches",
        "index_coding",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        threshold: float | str,
        alpha: float = 2.0,
        zeta: float = 0.999,
        microbatches: int | None = None,
        index_coding: str = "fixed",
        **kwargs: Any,
    ):
        check_microbatches(microbatches)
        compressor = compressors.Hybrid(threshold, alpha, zeta, index_coding)
        kwargs = {"min_size": 0, **kwargs}
        super().__init__(inner_optimizer, compressor, Mean(compressor), **kwargs)
        self.threshold = threshold
        self.alpha = alpha
        self.zeta = zeta
        self.microbatches = microbatches
        self.index_coding = index_coding


def check_microbatches(microbatches: int | None) -> None:
    """Raises ValueError unless it is None or a number of groups with a variance."""
    if microbatches is not None:
        check_integer("microbatches", microbatches, 2)
