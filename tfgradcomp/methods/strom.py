"""Strom's compression: a sign for each residual beyond a threshold."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean


def strom(threshold: float | str, index_coding: str = "fixed") -> Method:
    r"""A sign for each element whose sum is beyond a threshold, nothing for the others.

    Worker: \( r \mathrel{+}= g \). Where \( |r| > \tau \) it sends
    \( S = \mathrm{sign}(r)\,\tau \) and \( r \mathrel{-}= S \): nothing is lost.
    Server: the mean; zero for an element that no worker has sent.

    The learning rate is that of uncompressed training. `traffic.ratio` is the number
    of elements over those sent. XLA (`jit_compile=True`) needs a single worker.

    Args:
        threshold: \( \tau \), positive, in the units of a mean gradient; or
            `"auto"`: in each step and for each variable, the value that |r| of one
            element in 32 exceeds. An element sends \( \pm\tau \) once a step, so a
            number should be about as large as |r| where it is sent. If it is far
            smaller, a residual is sent late, in many steps; `fit` then warns once.
        index_coding: `"fixed"`: 32 bits an element. `"delta"`: 1 bit and the gap to
            the element before, less than half of that, for a little arithmetic.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.strom(threshold=0.01)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
        2015.
    """
    compressor = compressors.Strom(threshold, index_coding)
    return Method(compressor, Mean(compressor), min_size=0, name="Strom")
