"""Both halves of a method: what a paper says, and nothing of networks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tfgradcomp.core.component import Component

if TYPE_CHECKING:
    from tfgradcomp.compressors.base import Compressor
    from tfgradcomp.compressors.weight_decay import WeightDecay
    from tfgradcomp.servers.base import Server


@dataclass(frozen=True)
class Method(Component):
    """A compressor for the workers, a server, and the weight decay around them.

    Equal arguments, equal behaviour: a method holds no variable and knows neither the
    number of workers nor the transport.

    Attributes:
        compressor: The worker's half.
        server: The server's half.
        weight_decay: The term that workers add to the server's reply, or None.
        noise_std: Deviation of the Gaussian noise that they add to it, the same on all
            workers.
    """

    compressor: Compressor
    server: Server
    weight_decay: WeightDecay | None = None
    noise_std: float = 0.0

    def __post_init__(self):
        if not 0 <= self.noise_std < math.inf:
            raise ValueError(
                "noise_std must be 0 or positive, and finite. "
                f"Received: noise_std={self.noise_std!r}"
            )

    def uncompressed(self) -> Method:
        """Returns the method with the same mathematics in which nothing is lost."""
        return replace(
            self,
            compressor=self.compressor.uncompressed(),
            server=self.server.uncompressed(),
        )

    def uncompressed_step(self) -> Method:
        """Returns the method in which nothing is lost, for single steps.

        Where `uncompressed` is for whole variables. The compressor's state has the same
        form, and what was owed waits; the server's is handled by `Server.wait`.
        """
        return replace(
            self,
            compressor=self.compressor.uncompressed_step(),
            server=self.server.uncompressed_step(),
        )

    def fused(self) -> Method:
        """Returns the method with chains of components replaced by one-pass kernels.

        The payloads, the states and the bits stay the same. Nothing else decides what
        is fused: whoever runs a method calls this once, when it binds it.
        """
        return replace(
            self, compressor=self.compressor.fused(), server=self.server.fused()
        )

    @property
    def is_blockwise(self) -> bool:
        """True if each block is compressed and combined by itself."""
        return self.compressor.is_blockwise and self.server.is_blockwise
