"""Keras' iterator over the batches of an epoch, none of which is public."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfgradcomp.compat.replace import replace


def epoch_iterator_of(frame: FrameType) -> Any:
    """Returns the epoch iterator of a frame of Keras' `fit`.

    Keras keeps it in a local variable only.
    """
    return frame.f_locals["epoch_iterator"]


def replace_begin_of_pass(function: Callable) -> None:
    """Makes each pass over the data begin by a function.

    Keras has no callback between the data's creation and a pass over it.

    Args:
        function: Called as `function(original, epoch_iterator)`.
    """
    replace(TFEpochIterator, "__iter__", function)


def replace_warning_of_early_end(function: Callable) -> None:
    """Makes Keras warn by a function that the data have ended early.

    Keras' warning cannot be switched off or explained.

    Args:
        function: Called as `function(original, epoch_iterator)`.
    """
    replace(TFEpochIterator, "_interrupted_warning", function)


def distributed_dataset(epoch_iterator: Any) -> Any:
    """Returns the dataset of the strategy that an epoch reads.

    Keras makes it of the user's data and shows it nowhere.
    """
    return epoch_iterator._distributed_dataset


def number_of_batches(epoch_iterator: Any) -> int | None:
    """Returns the number of batches of a pass, as far as Keras knows it.

    Keras shows the number to its progress bar only.
    """
    return epoch_iterator._num_batches


def set_number_of_batches(epoch_iterator: Any, count: int | None) -> None:
    """Sets the number of batches of a pass.

    The public `steps_per_epoch` is an argument of `fit`, read before the loop.
    """
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
