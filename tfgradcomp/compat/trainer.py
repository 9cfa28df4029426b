"""Access for callbacks to parts of a Keras model that have no public name."""

from __future__ import annotations

import keras
from keras.optimizers import Optimizer


def prepare_to_resume(model: keras.Model, epoch: int) -> None:
    """Creates the optimizer's variables and makes `fit` start at `epoch`.

    Raises:
        ValueError: If the model has no weights yet.
    """
    if not model.built:
        raise ValueError(
            "A model must be built before its weights can be restored. Give it an "
            "Input layer, or call it on a batch before `fit`. "
            f"Received: model={model.name}, not built"
        )
    if not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    model._initial_epoch = epoch


def optimizers_of(model: keras.Model) -> list:
    """Returns the optimizers of a model, which may have several as attributes."""
    return [value for value in vars(model).values() if isinstance(value, Optimizer)]


def epoch_to_resume_at(model: keras.Model) -> int:
    """Returns the epoch that a callback wants `fit` to start at, or 0."""
    return model._initial_epoch or 0


def random_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of the model's seed generators (dropout, ...) by their paths.

    They are what is neither a weight nor part of a metric.
    """
    others = {id(v) for v in [*model.weights, *model.metrics_variables]}
    return {v.path: v for v in model.variables if id(v) not in others}
