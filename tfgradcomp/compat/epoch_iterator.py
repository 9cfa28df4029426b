"""Keras' iterator over the batches of an epoch, none of which is public."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FrameType
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfgradcomp.compat.replace import replace

replace_begin_of_pass = functools.partial(replace, TFEpochIterator, "__iter__")
"""Makes a pass over the data begin by `function(original, epoch_iterator)`.

Keras has no callback between the data's creation and a pass over it.
"""

replace_warning_of_early_end = functools.partial(
    replace, TFEpochIterator, "_interrupted_warning"
)
"""Makes Keras warn of an early end of data by `function(original, epoch_iterator)`.

Keras' warning cannot be switched off or explained.
"""


def epoch_iterator_of(frame: FrameType) -> Any:
    """Returns the epoch iterator of a frame of Keras' `fit`, a local variable there."""
    return frame.f_locals["epoch_iterator"]


def strategy_of(epoch_iterator: Any) -> tf.distribute.Strategy:
    """Returns the strategy that trains or evaluates the model."""
    return epoch_iterator._distribute_strategy


def distributed_dataset(epoch_iterator: Any) -> Any:
    """Returns the strategy's dataset, which Keras has made of the user's data."""
    return epoch_iterator._distributed_dataset


def number_of_batches(epoch_iterator: Any) -> int | None:
    """Returns the number of batches of a pass, as far as Keras knows it."""
    return epoch_iterator._num_batches


def set_number_of_batches(epoch_iterator: Any, count: int | None) -> None:
    """Sets the number of batches; `fit` reads `steps_per_epoch` before the loop."""
    epoch_iterator._num_batches = count


def skip_batches(epoch_iterator: Any, count: int) -> None:
    """Makes the next pass begin after some batches; a second call replaces the first.

    Keras can begin at an epoch, but not within an epoch.
    """
    passes = functools.partial(_rest_of_pass, epoch_iterator, count)
    vars(epoch_iterator)["_enumerate_iterator"] = passes


def _rest_of_pass(epoch_iterator: Any, count: int) -> Iterator[tuple]:
    del vars(epoch_iterator)["_enumerate_iterator"]
    for step in epoch_iterator._enumerate_iterator():
        begin, *_, data = step
        skipped = min(max(count - begin, 0), epoch_iterator.steps_per_execution)
        for _ in range(skipped):
            next(data, None)
        if skipped < epoch_iterator.steps_per_execution:
            yield step
