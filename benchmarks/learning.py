"""What the workers of `time_to_accuracy.py` share, whatever framework trains.

A task is one training, as a worker reads it from task.json:

    way: what trains, a name in the worker's own table
    data: file with the arrays x, y, test_x and test_y
    seed: of the weights and of the order of the examples
    batch_size: of a worker
    steps: the most steps
    every: steps between two looks at the accuracy
    target: the accuracy at which training ends, or null, where nobody looks

and its answer the seconds of each step and the accuracies by their steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

RATE, MOMENTUM = 0.05, 0.9
WIDTHS = (784, 2560, 2560, 512, 10)


class Examples:
    """The examples of one worker, of as many as there are.

    Args:
        task: The task.
        rank: Of this worker.
        workers: N.
    """

    def __init__(self, task: dict, rank: int, workers: int):
        arrays = np.load(task["data"])
        order = np.random.default_rng(task["seed"]).permutation(len(arrays["y"]))
        own = order[rank::workers]
        self._x, self._y = _floats(arrays["x"][own]), arrays["y"][own]
        self._size = task["batch_size"]
        self.test = _floats(arrays["test_x"][rank::workers])
        self.labels = arrays["test_y"][rank::workers]
        self.all_labels = len(arrays["test_y"])

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the inputs and the labels of a step."""
        begin = step * self._size % (len(self._y) - self._size + 1)
        chosen = slice(begin, begin + self._size)
        return self._x[chosen], self._y[chosen]


def train(task: dict, examples: Examples, step: Callable, hits: Callable) -> dict:
    """Trains until the target or the last step; returns the answer.

    Args:
        task: The task.
        examples: Of this worker.
        step: Takes the inputs and the labels of a batch.
        hits: Returns how many test examples of all workers are right.
    """
    seconds, accuracies = [], []
    for number in range(task["steps"]):
        batch = examples.batch(number)
        begin = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - begin)
        if task["target"] is None or (number + 1) % task["every"]:
            continue
        accuracies.append((number + 1, hits() / examples.all_labels))
        if accuracies[-1][1] >= task["target"]:
            break
    return {"seconds": seconds, "accuracies": accuracies}


def _floats(images):
    return images.reshape(len(images), -1).astype(np.float32) / 255 - 0.5
