"""Strategies of TensorFlow: tests and reductions without a public name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)

from tfgradcomp.compat.replace import replace, replaced_attribute

replace_reduction = partial(replace, CollectiveAllReduceExtended, "_reduce_to")
"""Makes multi-worker strategies reduce by `function(original, *args, **kwargs)`.

Keras reads metrics of all workers by this reduction, which has no public hook.
"""


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the strategy spans several processes.

    The public type does not say so: a `MultiWorkerMirroredStrategy` without a cluster
    has a single process.
    """
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )


@contextlib.contextmanager
def first_values_unsent(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes new variables begin with each worker's value while the context lasts.

    TensorFlow sends the value of the first worker to all others, and has no option.
    """

    def initial_value(*, initial_value, **_):
        return initial_value

    name = "_get_variable_creator_initial_value"
    with replaced_attribute(strategy.extended, name, initial_value):
        yield


def runs_without_merge_call() -> bool:
    """Returns whether replicas can update variables without a `merge_call`.

    TensorFlow decides it by the strategy and has no public function for it.
    """
    return tf.__internal__.distribute.strategy_supports_no_merge_call()
