"""Checks of the strategy around an optimizer, and of the optimizer inside."""

from __future__ import annotations

import warnings

import keras
import tensorflow as tf

from tfgradcomp.compressors import Compressor, ErrorFeedback

# By these names Keras' optimizers call what decays the averages of squares.
_SECOND_MOMENTS = (
    "beta_2",
    "adam_beta_2",
    "beta_2_decay",
    "rho",
    "initial_accumulator_value",
)


def check_strategy(owner: str) -> tf.distribute.Strategy:
    """Returns the current strategy.

    Args:
        owner: Name of the class that asks, for the error.

    Raises:
        ValueError: If gradients cannot be exchanged under it.
    """
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
    return strategy


def warn_before_second_moments(
    owner: str, compressor: Compressor, inner: keras.optimizers.Optimizer
) -> None:
    """Warns where error feedback stands in front of Adam or the like.

    Args:
        owner: Name of the class that asks.
        compressor: The workers' half of the method.
        inner: The inner optimizer.
    """
    part: Compressor | None = compressor
    while part is not None and not isinstance(part, ErrorFeedback):
        part = getattr(part, "compressor", None)
    if part is not None and any(hasattr(inner, name) for name in _SECOND_MOMENTS):
        warnings.warn(
            f"{owner} feeds errors back into the gradient, and {type(inner).__name__} "
            "rescales each element by averages over past gradients: what was owed for "
            "many steps comes at once and counts as one large gradient. This is known "
            "to train badly; take keras.optimizers.SGD inside, or a method without "
            f"error feedback. Received: inner_optimizer={type(inner).__name__}",
            UserWarning,
            stacklevel=4,
        )
