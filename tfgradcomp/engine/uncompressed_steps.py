"""The steps that travel as float32, by the step counter."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.core.arguments import check_integer


@dataclass(frozen=True)
class UncompressedSteps:
    """The first `warmup_steps` steps, and every `dense_every`-th step.

    Attributes:
        warmup_steps: Number of steps, 0 or more.
        dense_every: 1 or more: of so many steps the last one; None: none.

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
        """Returns whether a step is one of them.

        Args:
            step: int64 scalar, the number of updates applied so far, the same on all
                workers.
        """
        is_included = step < self.warmup_steps
        if self.dense_every is not None:
            is_included |= tf.equal((step + 1) % self.dense_every, 0)
        return is_included

    def count(self, step: tf.Tensor) -> tf.Tensor:
        """Returns how many steps there are among those up to `step`, this one included.

        Args:
            step: int64 scalar, as `include` takes it.
        """
        found = tf.minimum(step + 1, self.warmup_steps)
        if self.dense_every is not None:
            later = (step + 1) // self.dense_every
            found += tf.maximum(later - self.warmup_steps // self.dense_every, 0)
        return found
