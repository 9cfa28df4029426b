"""Time a training step of LeNet on one worker, wrapped and unwrapped.

    python benchmarks/step.py

With one worker nothing travels: what a wrapped step takes longer is what the wrapper
costs, its compression included. Steps run as `model.fit` runs them, in Keras' own train
function; those of all optimizers alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import keras
import numpy as np
import report
import tensorflow as tf
import wrappers

import tfgradcomp

SGD = keras.optimizers.SGD
PLAIN = {"SGD": lambda: SGD(1e-3), "SGD, momentum": lambda: SGD(1e-3, momentum=0.9)}
# Momentum where the wrapper has one of its own.
MOMENTUM = wrappers.taking("momentum")
WRAPPED = {
    name: "SGD, momentum" if name in MOMENTUM else "SGD"
    for name in wrappers.needing_no_arguments()
}


def lenet() -> keras.Model:
    """Returns the LeNet of 431,080 parameters that TernGrad's paper trains."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5),
            layers.MaxPooling2D(),
            layers.Conv2D(50, 5),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(10),
        ]
    )


def step_of(optimizer: keras.optimizers.Optimizer, batch: int):
    """Returns a function that takes one step."""
    rng = np.random.default_rng(0)
    x = tf.constant(rng.random((batch, 28, 28, 1), np.float32))
    y = tf.constant(rng.integers(0, 10, batch))
    model = lenet()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.make_train_function()
    data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    return lambda: model.train_function(data)


def parse_arguments(doc: str) -> argparse.Namespace:
    """Reads what a benchmark of steps is told, of which `doc` says what it is."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="in a round, of each")
    parser.add_argument("--output", type=Path, help="folder; default: results, README")
    return parser.parse_args()


def times_of(steps: dict, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the milliseconds of each step in each round, the steps alternating."""
    times = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(arguments.steps):
            step()
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(arguments.steps):
                step()
            elapsed = time.perf_counter() - began
            times[name].append(1e3 * elapsed / arguments.steps)
    return times


def publish(name: str, rows: list[dict], table: list[str], arguments) -> None:
    """Writes rows as CSV and a table under the measurement's conditions, and prints."""
    lines = [
        report.head(
            f"batches of {arguments.batch}; {arguments.rounds} rounds of "
            f"{arguments.steps} steps"
        ),
        "",
        *table,
    ]
    report.publish(arguments.output, name, rows[0], rows, lines)


def main() -> None:
    """Measures, and writes table and CSV."""
    arguments = parse_arguments(__doc__)
    makers = dict(PLAIN)
    for name in WRAPPED:
        makers[name] = lambda name=name: getattr(tfgradcomp, name)(SGD(1e-3))
    steps = {name: step_of(make(), arguments.batch) for name, make in makers.items()}
    times = times_of(steps, arguments)
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, plain in WRAPPED.items():
        ratios = [a / b for a, b in zip(times[name], times[plain], strict=True)]
        rows.append(
            {
                "optimizer": name,
                "step_ms": median[name],
                "plain": plain,
                "plain_ms": median[plain],
                "ratio": statistics.median(ratios),
            }
        )
    table = [
        "| optimizer | step, ms | unwrapped | step, ms | wrapped / unwrapped |",
        "|---|---|---|---|---|",
        *(
            f"| `{row['optimizer']}` | {row['step_ms']:.2f} | {row['plain']} | "
            f"{row['plain_ms']:.2f} | {row['ratio']:.3f} |"
            for row in rows
        ),
    ]
    publish("step", rows, table, arguments)


if __name__ == "__main__":
    main()
