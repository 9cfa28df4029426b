"""Time a training step of LeNet with the second moments of its examples' gradients.

    python benchmarks/second_moments.py

Steps run as `model.fit` runs them, in Keras' own train function: plain SGD, SGD that
keeps the moments as well, and SGD that keeps those of microbatches. They alternate in
one process.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import keras
import step

from tfgradcomp.per_example.second_moments import enable_second_moments

HERE = Path(__file__).resolve().parent


class WithMoments(keras.optimizers.SGD):
    """SGD that stores the second moments, as a compressor of gradients would."""

    needs_second_moments = True

    def __init__(self, learning_rate: float, microbatches: int | None = None):
        super().__init__(learning_rate)
        self.microbatches = microbatches

    def build(self, variables):
        """Creates a variable for each moment."""
        super().build(variables)
        self.moments = [self.add_variable_from_reference(v, "m") for v in variables]

    def apply(self, grads, trainable_variables=None, second_moments=None):
        """Stores the moments and updates the weights."""
        super().apply(grads, trainable_variables)
        for variable, moment in zip(self.moments, second_moments, strict=True):
            variable.assign(moment)


OPTIMIZERS = {
    "none": lambda: keras.optimizers.SGD(1e-3),
    "of each example": lambda: WithMoments(1e-3),
    "of 8 microbatches": lambda: WithMoments(1e-3, microbatches=8),
}


def main() -> None:
    """Measures, and writes table and CSV."""
    arguments = step.parse_arguments(__doc__)
    enable_second_moments()
    steps = {
        name: step.step_of(make(), arguments.batch) for name, make in OPTIMIZERS.items()
    }
    times = step.times_of(steps, arguments)
    plain = statistics.median(times["none"])
    rows = [
        {
            "moments": name,
            "step_ms": statistics.median(values),
            "ratio": statistics.median(values) / plain,
        }
        for name, values in times.items()
    ]
    table = [
        "| second moments | step, ms | with / without |",
        "|---|---|---|",
        *(
            f"| {row['moments']} | {row['step_ms']:.2f} | {row['ratio']:.2f} |"
            for row in rows
        ),
    ]
    step.publish("second_moments", rows, table, arguments)


if __name__ == "__main__":
    main()
