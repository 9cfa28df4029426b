"""The steps whose gradients travel as float32, by the step counter."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.core.arguments import check_integer


@dataclass(frozen=True)
class UncompressedSteps:
    """The first `warmup_steps` steps, and every `dense_every`-th step.

    Attributes:
        warmup_steps: Number of steps at the beginning, 0 or more.
        dense_every: 1 or more; None: there are no further steps.

    Raises:
        ValueError: If an argument is out of range.
    """

    warmup_steps: int = 0
    dense_every: int | None = None

    def __post_init__(self):
        check_integer("warmup_steps", self.warmup_steps, 0)
        if self.dense_every is not None:
            check_integer("dense_every", self.dense_every, 1)

    def __bool__(self):
        return self.warmup_steps > 0 or self.dense_every is not None

    def include(self, step: tf.Tensor) -> tf.Tensor:
        """Returns whether a step is uncompressed.

        Args:
            step: int64 scalar, the number of updates applied so far.
        """
        is_included = step < self.warmup_steps
        if self.dense_every is not None:
            is_included |= tf.equal((step + 1) % self.dense_every, 0)
        return is_included

    def count(self, step: tf.Tensor) -> tf.Tensor:
        """Returns how many of the steps up to `step`, inclusive, are uncompressed."""
        found = tf.minimum(step + 1, self.warmup_steps)
        if self.dense_every is not None:
            later = (step + 1) // self.dense_every
            found += tf.maximum(later - self.warmup_steps // self.dense_every, 0)
        return found
