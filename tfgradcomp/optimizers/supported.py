"""Checks of the strategy around an optimizer, and of the optimizer inside."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from tfgradcomp.collectives import enable_multi_worker_fit
from tfgradcomp.compat.inner_optimizer import strategy_of
from tfgradcomp.compressors import Compressor, ErrorFeedback, Identity
from tfgradcomp.per_example.second_moments import enable_second_moments

# By these names Keras' optimizers call what decays the averages of squares.
_SECOND_MOMENTS = (
    "beta_2",
    "adam_beta_2",
    "beta_2_decay",
    "rho",
    "initial_accumulator_value",
)


def prepare(optimizer: Any) -> tf.distribute.Strategy:
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


def rescales(inner: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer divides each element by averages of its squares."""
    return any(hasattr(inner, name) for name in _SECOND_MOMENTS)


def warn_before_second_moments(optimizer: Any, compressor: Compressor) -> None:
    """Warns where error feedback stands in front of Adam or the like.

    Args:
        optimizer: The `CompressedOptimizer` that asks.
        compressor: Its compressor.
    """
    part: Any = compressor
    while part is not None and not isinstance(part, ErrorFeedback):
        part = getattr(part, "compressor", None)
    inner = optimizer.inner_optimizer
    if part is None or part.compressor == Identity():
        return
    if rescales(inner) and not optimizer.stepper_class.sends_momenta:
        warnings.warn(
            "Error feedback stands in front of an inner optimizer that "
            "rescales each element by averages over past gradients: what was owed for "
            "many steps comes at once and counts as one large gradient. This is known "
            "to train badly; take keras.optimizers.SGD inside, or a method without "
            f"error feedback. Received: inner_optimizer={type(inner).__name__}",
            UserWarning,
            stacklevel=4,
        )
