"""The anchor: the weights that hub and clients have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfgradcomp.core.digest import digest64


@dataclass(frozen=True)
class OuterStep:
    r"""Moves the anchor by the decoded reply of a round.

    Without momentum \( \bar x \leftarrow \bar x - \eta u \). With momentum \( v
    \leftarrow \mu v + u \), \( \bar x \leftarrow \bar x - \eta v \); Nesterov's takes
    \( u + \mu v \) in place of v. Each operation is rounded to float32, so that hub
    and clients get the same bits on any processor.

    Args:
        learning_rate: \( \eta \). With 1 and no momentum, an uncompressed training is
            federated averaging.
        momentum: \( \mu \) in [0, 1).
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        hub = tfgradcomp.federated.Hub(make_model, method, outer=OuterStep(0.7, 0.9))
        ```

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from
        Decentralized Data, 2017; Douillard et al., DiLoCo, 2023.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                "learning_rate must be positive and finite. "
                f"Received: learning_rate={self.learning_rate!r}"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum must be in [0, 1). Received: momentum={self.momentum!r}"
            )


class Anchor(NamedTuple):
    """The weights after some rounds.

    Attributes:
        round: Number of rounds.
        weights: float32 `[size]`, all trained variables.
        velocity: float32 `[size]`; `[0]` without outer momentum.
        statistics: float32, the statistics of normalization layers.
    """

    round: int
    weights: np.ndarray
    velocity: np.ndarray
    statistics: np.ndarray

    @classmethod
    def first(
        cls, weights: np.ndarray, statistics: np.ndarray, outer: OuterStep
    ) -> Anchor:
        """Returns the anchor before the first round."""
        velocity = np.zeros(weights.size if outer.momentum else 0, np.float32)
        return cls(0, weights, velocity, statistics)

    @classmethod
    def of(cls, round: int, arrays: Mapping[str, np.ndarray]) -> Anchor:
        """Returns the anchor whose `arrays` are among those of a file."""
        return cls(round, *(arrays[name] for name in cls._fields[1:]))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names."""
        return {name: getattr(self, name) for name in self._fields[1:]}

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def digest(self) -> int:
        """64 bits of a hash of weights, velocity and statistics."""
        parts = [digest64(part) for part in self.arrays.values()]
        return digest64(np.array(parts, "<i8"))

    def moved(
        self, update: np.ndarray, statistics: np.ndarray, outer: OuterStep
    ) -> Anchor:
        """Returns the anchor after a round.

        Args:
            update: float32 `[size]`, the decoded reply.
            statistics: The mean statistics of the round.
            outer: The outer step.
        """
        velocity, direction = self.velocity, update
        rate, momentum = np.float32(outer.learning_rate), np.float32(outer.momentum)
        if outer.momentum:
            velocity = momentum * velocity + update
            direction = update + momentum * velocity if outer.nesterov else velocity
        weights = self.weights - rate * direction
        return Anchor(self.round + 1, weights, velocity, statistics)


def hexadecimal(digest: int) -> str:
    """Returns a digest as people compare it."""
    return f"{digest % 2**64:016x}"


NO_ANCHOR = Anchor(-1, *[np.zeros(0, np.float32)] * 3)
"""The anchor of a client that has none."""
