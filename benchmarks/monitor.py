"""Measure what `CompressionMonitor` adds to a training step of LeNet on one worker.

    python benchmarks/monitor.py

A round is `--every` steps, of which one is sampled; rounds with the callback and rounds
without it take turns in one process. CPU time is that of all threads, and depends less
on who else computes on the machine than wall time does. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from report import processor
from step import lenet

import tfgradcomp

METHODS = ("TernGrad", "Signum", "DistEFBlockSGDM")


def steps_of(method: str, batch: int, callback: keras.callbacks.Callback | None):
    """Returns a function that takes some steps as `fit` does."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.random((batch, 28, 28, 1), np.float32)
    y = rng.integers(0, 10, batch)
    model = lenet()
    optimizer = getattr(tfgradcomp, method)(keras.optimizers.SGD(1e-3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    model.make_train_function()
    if callback:
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_begin(0)
    batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    taken = itertools.count()

    def take(steps):
        for step in itertools.islice(taken, steps):
            model.train_function(batches)
            if callback:
                callback.on_train_batch_end(step)

    return take


def measure(method: str, batch: int, every: int, rounds: int) -> list[list]:
    """Returns the times of rounds without the callback and of rounds with it.

    Returns:
        For each, pairs of CPU and wall time, in milliseconds a step.
    """
    callback = tfgradcomp.callbacks.CompressionMonitor(every=every)
    takes = [steps_of(method, batch, one) for one in (None, callback)]
    times: list[list] = [[], []]
    for number in range(1 + rounds):
        for take, own in zip(takes, times, strict=True):
            cpu, wall = time.process_time(), time.perf_counter()
            take(every)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            # The first round traces the step.
            if number:
                own.append((1000 * cpu / every, 1000 * wall / every))
    return times


def main():
    """Prints a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    given = parser.parse_args()
    print(processor())
    print("method, CPU ms a step without, with, added in %; wall ms without, with")
    for method in given.methods:
        pair = measure(method, given.batch, given.every, given.rounds)
        cpu, wall = (
            [statistics.median(times[kind] for times in own) for own in pair]
            for kind in (0, 1)
        )
        added = 100 * (cpu[1] / cpu[0] - 1)
        print(
            f"{method}, {cpu[0]:.2f}, {cpu[1]:.2f}, {added:+.1f}; "
            f"{wall[0]:.2f}, {wall[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
