"""Access for callbacks to parts of a Keras model that have no public name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
from keras.optimizers import Optimizer
from keras.src.backend.tensorflow import trainer as keras_trainer


def prepare_to_resume(model: keras.Model, epoch: int, batch: int = 0) -> None:
    """Creates the optimizer's variables and makes `fit` go on where it was.

    Args:
        model: The model.
        epoch: The epoch to begin with.
        batch: How many of its batches are skipped.

    Raises:
        ValueError: If the model has no weights yet.
        RuntimeError: If batches are to be skipped, but the model is not in `fit`.
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
    frame = frame_of_fit(model, inspect.currentframe())
    if frame is not None:
        # Also takes back what an attempt with another backup has asked for.
        iterator = frame.f_locals["epoch_iterator"]
        passes = functools.partial(_rest_of_epoch, iterator, batch)
        vars(iterator)["_enumerate_iterator"] = passes
    elif batch:
        raise RuntimeError(
            "Batches can be skipped in Keras' own `fit` only. Expected: a backup of "
            f"the end of an epoch. Received: batch={batch} of epoch={epoch}"
        )
    model._initial_epoch = epoch


def frame_of_fit(model: keras.Model, frame: FrameType | None) -> FrameType | None:
    """Returns the frame of Keras' `fit` of a model among the callers of a frame."""
    code = inspect.unwrap(keras_trainer.TensorFlowTrainer.fit).__code__
    while frame is not None:
        if frame.f_code is code and frame.f_locals["self"] is model:
            return frame
        frame = frame.f_back
    return None


def _rest_of_epoch(iterator: Any, batches: int) -> Iterator[tuple]:
    """Iterates as `iterator` does; the first pass begins after some batches."""
    del vars(iterator)["_enumerate_iterator"]
    for step in iterator._enumerate_iterator():
        begin, *_, data = step
        skipped = min(max(batches - begin, 0), iterator.steps_per_execution)
        for _ in range(skipped):
            next(data, None)
        if skipped < iterator.steps_per_execution:
            yield step


def optimizers_of(model: keras.Model) -> list:
    """Returns the optimizers of a model, which may have several as attributes."""
    return [value for value in vars(model).values() if isinstance(value, Optimizer)]


def wrappers_of(model: keras.Model) -> list:
    """Returns this package's wrappers among the optimizers of a model."""
    found = {}
    for optimizer in optimizers_of(model):
        # A scale of the loss is around the wrapper.
        while optimizer is not None and not hasattr(type(optimizer), "verify"):
            optimizer = vars(optimizer).get("inner_optimizer")
        if optimizer is not None:
            found[id(optimizer)] = optimizer
    return [*found.values()]


def epoch_to_resume_at(model: keras.Model) -> int:
    """Returns the epoch that a callback wants `fit` to start at, or 0."""
    return model._initial_epoch or 0
