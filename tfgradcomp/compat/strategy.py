"""Strategies of TensorFlow: tests and reductions without a public name."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)

from tfgradcomp.compat.replace import replace


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the strategy spans several processes.

    The public type does not say so: a `MultiWorkerMirroredStrategy` without a cluster
    has one process.
    """
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )


def runs_without_merge_call() -> bool:
    """Returns whether replicas can update variables without a `merge_call`.

    TensorFlow decides it by the strategy and has no public function for it.
    """
    return tf.__internal__.distribute.strategy_supports_no_merge_call()


def replace_reduction(function: Callable) -> None:
    """Makes a multi-worker strategy reduce values by a function.

    Keras reads metrics of all workers by this reduction, which has no public hook.

    Args:
        function: Called as `function(original, *args, **kwargs)`.
    """
    replace(CollectiveAllReduceExtended, "_reduce_to", function)
