"""Checks of the strategy around an optimizer, with Keras prepared to train under it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfgradcomp.compat.inner_optimizer import strategy_of
from tfgradcomp.fit.enable import enable_multi_worker_fit
from tfgradcomp.per_example.second_moments import enable_second_moments


def check_strategy(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the current strategy, with Keras prepared to train under it.

    Args:
        optimizer: The `CompressedOptimizer` that asks.

    Raises:
        ValueError: If gradients cannot be exchanged under it, or if the inner optimizer
            was created under another one.
    """
    owner, inner = type(optimizer).__name__, optimizer.inner_optimizer
    strategy = tf.distribute.get_strategy()
    supported = (
        tf.distribute.OneDeviceStrategy,
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    if tf.distribute.has_strategy() and not isinstance(strategy, supported):
        raise ValueError(
            f"{owner} works without a strategy, under MirroredStrategy and under "
            "MultiWorkerMirroredStrategy; with parameter servers take "
            "tfgradcomp.ParameterServerTrainer. "
            f"Received: strategy={type(strategy).__name__}"
        )
    if strategy_of(inner) is not strategy:
        raise ValueError(
            f"{owner} and its inner optimizer must be created under the strategy that "
            "they train under, since their variables belong to it: create them within "
            "`with strategy.scope():`, where the model is created and compiled. "
            f"Received: {type(inner).__name__} created under "
            f"{type(strategy_of(inner)).__name__}, now under {type(strategy).__name__}"
        )
    if tf.distribute.has_strategy():
        enable_multi_worker_fit()
    if optimizer.needs_second_moments:
        enable_second_moments()
    return strategy
