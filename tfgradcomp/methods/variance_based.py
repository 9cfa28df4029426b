"""Variance-based compression, and its hybrid with Strom's."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean


def variance_based(
    alpha: float = 1.5,
    zeta: float = 0.999,
    microbatches: int | None = None,
    index_coding: str = "fixed",
) -> Method:
    r"""A word for each element whose sign is beyond doubt, nothing for the others.

    Worker: \( r \mathrel{+}= \sum_z g_z \), \( v \mathrel{+}= \sum_z g_z^2 \) over its
    examples z, where \( \sum_z g_z \) is its mean gradient. Where \( r^2 > \alpha v \)
    it sends r, rounded to a power of two, and both start again at zero; elsewhere r
    waits, and \( v \leftarrow \zeta v \). Server: the mean; zero for an element that no
    worker has sent, which is then the gradient of the inner optimizer.

    The learning rate is that of uncompressed training. `traffic.ratio` is the paper's
    compression ratio. XLA (`jit_compile=True`) is for one worker only.

    Args:
        alpha: \( \alpha \), 1 to 2. With a larger value, less is sent, and later.
        zeta: \( \zeta \) in [0, 1], the decay of v.
        microbatches: Number of groups of examples, at least 2, whose gradients stand
            for those of the examples. Groups need less memory and time, and tell less
            about the variance. None: each example by itself.
        index_coding: `"fixed"`: 32 bits an element. `"delta"`: 4 bits and the gap to
            the element before, about half of that, for a little arithmetic.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.variance_based()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.Adam(), method
        )
        ```

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Figure 1.
    """
    compressor = compressors.VarianceBased(alpha, zeta, index_coding)
    return _method("VarianceBased", compressor, microbatches)


def hybrid(
    threshold: float | str,
    alpha: float = 2.0,
    zeta: float = 0.999,
    microbatches: int | None = None,
    index_coding: str = "fixed",
) -> Method:
    r"""A sign for each element that is beyond a threshold, and beyond doubt.

    Worker: \( r \mathrel{+}= \sum_z g_z \), \( v \mathrel{+}= \sum_z g_z^2 \) over its
    examples z, where \( \sum_z g_z \) is its mean gradient. Where \( |r| > \tau \) and
    \( r^2 > \alpha v \) it sends \( S = \mathrm{sign}(r)\,\tau \),
    \( v \leftarrow \max(v - 2|r|\tau + \tau^2, 0) \) and \( r \mathrel{-}= S \). Then
    \( v \leftarrow \zeta v \). Server: the mean.

    The learning rate is that of uncompressed training. `traffic.ratio` is the paper's
    compression ratio. XLA (`jit_compile=True`) is for one worker only.

    Args:
        threshold: \( \tau \), positive, in the units of a mean gradient; or
            `"auto"`: in each step and for each variable, a worker takes the value with
            which its signs reduce the squares of the unambiguous residual most. Use
            `"auto"` with momentum SGD inside: while an element waits, its residual
            outgrows a fixed number and is then sent late. In docs/studies/sparse.md,
            fixed numbers that worked for `strom` lost several points more than `"auto"`
            here, and sent several times as much.
        alpha: As for `variance_based`.
        zeta: As for `variance_based`.
        microbatches: As for `variance_based`.
        index_coding: As for `variance_based`, with 1 bit instead of 4.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.hybrid(threshold="auto")
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.Adam(), method
        )
        ```

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Figure 2.
    """
    compressor = compressors.Hybrid(threshold, alpha, zeta, index_coding)
    return _method("Hybrid", compressor, microbatches)


def _method(name, compressor, microbatches):
    if microbatches is not None:
        check_integer("microbatches", microbatches, 2)
    return Method(
        compressor,
        Mean(compressor),
        microbatches=microbatches,
        min_size=0,
        name=name,
    )
