"""The optimizers of a Keras model."""

from __future__ import annotations

import keras


def optimizers_of(model: keras.Model) -> list:
    """Returns all optimizers of a model, which may have several as attributes."""
    optimizer = keras.optimizers.Optimizer
    return [value for value in vars(model).values() if isinstance(value, optimizer)]


def wrappers_of(model: keras.Model) -> list:
    """Returns this package's wrappers among the optimizers of a model."""
    found = {}
    for optimizer in optimizers_of(model):
        # A `LossScaleOptimizer` holds the wrapper as its inner optimizer.
        while optimizer is not None and not hasattr(type(optimizer), "verify"):
            optimizer = vars(optimizer).get("inner_optimizer")
        if optimizer is not None:
            found[id(optimizer)] = optimizer
    return [*found.values()]
