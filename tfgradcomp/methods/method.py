"""Both halves of a method: what a paper says, and nothing of networks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tfgradcomp.compressors import Compressor, OptimalScale, WeightDecay
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.core import Component
from tfgradcomp.core.arguments import check_instance, check_integer
from tfgradcomp.servers import Server

MIN_SIZE = 1024


@dataclass(frozen=True)
class Method(Component):
    """A compressor for the workers, a server, and the other arguments of a paper.

    Methods of equal mathematics are equal, whatever their names. A method holds no
    variable and knows neither the number of workers nor the transport.

    Args:
        compressor: The worker's half.
        server: The server's half.
        weight_decay: The term that workers add to the server's reply, or None.
        noise_std: Standard deviation of the Gaussian noise that workers add to the
            reply, the same on all of them.
        block_size: Elements a block. None: a block is a parameter tensor. `"model"`:
            the whole model is one block.
        microbatches: Number of groups of examples whose second moments stand for those
            of the examples; None: the second moments of each example.
        min_size: Variables with fewer elements are not compressed by default.
        refuses_inner_momentum: Whether the method holds the momentum, so that an inner
            optimizer with momentum is an error unless `allow_inner_momentum` is given.
        name: Name of the method, for people. If empty, the names of both halves.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.Method(ErrorFeedback(TopK(0.01)), Mean(TopK(0.01)))
        optimizer = tfgradcomp.CompressedOptimizer(keras.optimizers.SGD(0.1), method)
        ```
    """

    compressor: Compressor
    server: Server
    weight_decay: WeightDecay | None = None
    noise_std: float = 0.0
    block_size: int | str | None = None
    microbatches: int | None = None
    min_size: int = field(default=MIN_SIZE, compare=False, repr=False)
    refuses_inner_momentum: bool = field(default=False, compare=False, repr=False)
    name: str = field(default="", compare=False, repr=False)

    def __post_init__(self):
        check_instance("compressor", self.compressor, Compressor)
        check_instance("server", self.server, Server)
        if not 0 <= self.noise_std < math.inf:
            raise ValueError(
                "noise_std must be 0 or positive, and finite. "
                f"Received: noise_std={self.noise_std!r}"
            )
        if self.block_size not in (None, "model"):
            check_integer("block_size", self.block_size, 1)
        if not self.name:
            halves = type(self.compressor).__name__, type(self.server).__name__
            # The dataclass is frozen.
            object.__setattr__(self, "name", ", ".join(halves))

    @property
    def needs_second_moments(self) -> bool:
        """True if the compressor needs second moments."""
        return self.compressor.needs_second_moments

    @property
    def needs_whole_tensors(self) -> bool:
        """True if no tensor may be cut."""
        return self.compressor.needs_whole_tensors

    @property
    def is_scaled(self) -> bool:
        """True if updates are as large as gradients; False for signs."""
        part = self.compressor
        # An optimal scale gives a scale to signs.
        while isinstance(part, Wrapper) and not isinstance(part, OptimalScale):
            part = part.compressor
        return part.is_scaled

    def uncompressed(self) -> Method:
        """Returns the method with the same mathematics and no compression."""
        return replace(
            self,
            compressor=self.compressor.uncompressed(),
            server=self.server.uncompressed(),
            block_size="model",
            microbatches=None,
        )

    def uncompressed_step(self) -> Method:
        """Returns the method without compression, for single steps.

        `uncompressed` is for whole variables instead. Here the compressor's state has
        the form of this method's, and residuals wait; `Server.wait` handles those of
        the server.
        """
        return replace(
            self,
            compressor=self.compressor.uncompressed_step(),
            server=self.server.uncompressed_step(),
        )

    def fused(self) -> Method:
        """Returns the method with chains of components replaced by one-pass kernels.

        The payloads, the states and the bits stay the same. Transports call it once,
        when they bind the method; nothing else decides what is fused.
        """
        return replace(
            self, compressor=self.compressor.fused(), server=self.server.fused()
        )

    @property
    def is_blockwise(self) -> bool:
        """True if each block is compressed and combined by itself."""
        return self.compressor.is_blockwise and self.server.is_blockwise
