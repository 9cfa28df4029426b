"""Deep Gradient Compression."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean


def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    clip_norm: float | None = None,
    density_steps: int = 0,
) -> Method:
    r"""The largest of accumulated momenta: one element in a thousand a step.

    Worker: \( u \leftarrow \mu u + g \), \( v \leftarrow v + u \); it sends the k
    elements of v with the largest magnitude, 64 bits each, and sets u and v to zero
    there. Server: the mean; zero for an element that no worker has sent.

    The learning rate is that of SGD with momentum. The elements compete within the
    vector of all compressed variables, or, where a worker has several devices, within
    each device's part of it. A step with a learning rate of 0 leaves u and v as they
    are. In uncompressed steps, and for uncompressed variables, u itself travels, which
    is momentum SGD; v waits.

    Args:
        ratio: Share of the elements that is sent, in (0, 1]; at least one element.
        momentum: \( \mu \) in [0, 1).
        clip_norm: c, positive: bound of the norm of the mean gradient of all N workers.
            Each worker clips its own gradient to \( \sqrt{N} c \), the norm that makes
            the mean of independent gradients as long as c. None for no clipping.
        density_steps: Steps of each stage of the density at the start: 25 %, 6.25 %,
            1.56 %, 0.39 % and so on, until `ratio` is reached. The paper takes an epoch
            for each. 0: `ratio` from the first step on. With stages, messages vary in
            length, and XLA (`jit_compile=True`) is for one worker only.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.dgc(ratio=0.001, density_steps=500)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Lin, Han, Mao, Wang, Dally, Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training, 2018, Section 3, Appendix C.
    """
    compressor = compressors.DGC(ratio, momentum, clip_norm, density_steps)
    return Method(
        compressor,
        Mean(compressor),
        refuses_inner_momentum=True,
        name="DGC",
    )
