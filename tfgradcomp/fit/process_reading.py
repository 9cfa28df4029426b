"""Datasets that one process reads as each of several processes does."""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfgradcomp.compat.distributed_dataset import make_batches_optional

_extended_strategies: weakref.WeakSet = weakref.WeakSet()


def read_as_processes(strategy: tf.distribute.MirroredStrategy) -> None:
    """Makes one process read finite datasets as each of several processes does.

    With several processes, no step knows the number of its rows. With one process the
    number is known, and TensorFlow turns a division by it into a product.
    """
    make_batches_optional(strategy)
    _extended_strategies.add(strategy.extended)


def reads_as_processes(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether `read_as_processes` was called for the strategy."""
    return strategy.extended in _extended_strategies
