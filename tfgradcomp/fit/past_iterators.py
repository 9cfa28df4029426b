"""Iterators of past epochs: threads remove them, so that no worker waits for it.

TensorFlow removes an iterator only after the thread that tunes its pipeline has ended.
It wakes this thread first, and sets the flag that ends it afterwards: on busy cores the
thread often looks too early, and sleeps on. Its sleeps grow to the age of the iterator,
up to a minute, and all workers would wait for the one that waits.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import tensorflow as tf

from tfgradcomp.compat.distributed_dataset import (
    replace_iteration,
    tune_only_given_datasets,
)
from tfgradcomp.fit.loop_sync import innermost_loop

# Held here, so that the loop does not remove them itself.
_iterators: list[Any] = []


def keep_iterators() -> None:
    """Makes loops keep the iterators that they create, so that threads remove them."""
    tune_only_given_datasets()
    replace_iteration(_iterate)


def _iterate(original, dataset):
    remove_past_iterators()
    iterator = original(dataset)
    if innermost_loop() and tf.executing_eagerly():
        _iterators.append(iterator)
    return iterator


def remove_past_iterators() -> None:
    """Removes the iterators that no loop uses any more, each in a thread of its own."""
    for index in reversed(range(len(_iterators))):
        # One reference is the list's, the other one this call's.
        if sys.getrefcount(_iterators[index]) == 2:
            past = [_iterators.pop(index)]
            threading.Thread(target=past.clear, name="past iterator").start()
