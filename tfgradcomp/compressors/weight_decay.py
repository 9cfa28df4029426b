"""Uncompressed weight decay, which each worker adds to the server's reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfgradcomp.core import Component, Layout, State


@dataclass(frozen=True)
class WeightDecay(Component):
    r"""The term \( \lambda x \), or \( \mu m' + \lambda x \) after
    \( m' \leftarrow \mu m' + \lambda x \).

    Weights are equal on all workers, and so is this term.

    Attributes:
        rate: \( \lambda \), not negative.
        momentum: \( \mu \) in [0, 1).

    References:
        Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback, 2019, Appendix A.
    """

    registered_package: ClassVar[str] = "tfgradcomp.compressors"

    rate: float
    momentum: float = 0.0

    def __post_init__(self):
        if not self.rate >= 0:
            raise ValueError(
                "weight_decay must be None or not negative. "
                f"Received: weight_decay={self.rate}"
            )

    def init(self, layout: Layout) -> State:
        """Returns the state before the first step."""
        return {"decay_momentum": tf.zeros([layout.size])} if self.momentum else ()

    def term(self, weights: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the term of the update, and the new state."""
        if not self.momentum:
            return self.rate * weights, state
        # Not `+`: Grappler would reorder the sum with later summands.
        negative = -self.rate * weights
        m = self.momentum * state["decay_momentum"] - negative
        return self.momentum * m - negative, {"decay_momentum": m}
