"""Keras' trainer: the parts of its loops and of its steps without a public name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgradcomp.compat.replace import replace

_Trainer = keras_trainer.TensorFlowTrainer

replace_loop = partial(replace, _Trainer)
"""Replaces a method, `fit`, `evaluate` or `predict`, of every model by a function.

Keras calls callbacks within a loop only, and none when a loop ends by an error.
"""

replace_symbolic_build = partial(replace, _Trainer, "_maybe_symbolic_build")
"""Replaces the build before a model's first step.

The function is called as `function(original, model, iterator=None, data_batch=None)`.
Keras builds from a batch, with no public way to give it a specification.
"""

replace_step_compilation = partial(replace, _Trainer, "_make_function")
"""Makes every model compile its steps by `function(original, model, step_function)`.

Only a subclass can override the public `train_step`, `test_step` and `predict_step`.
"""

replace_reduction_of_logs = partial(replace, keras_trainer, "reduce_per_replica")
"""Replaces the reduction of a step's results over replicas.

The function is called as `function(original, values, strategy, reduction)`. Keras has
no public hook between a step and its logs.
"""


def add_property(name: str, descriptor: Any) -> None:
    """Gives all models a property, unless they have it.

    Keras' flags such as `stop_training` are plain attributes, with no hook for reading.
    """
    if type(vars(_Trainer).get(name)) is not type(descriptor):
        setattr(_Trainer, name, descriptor)


def code_of_loop(kind: str) -> CodeType:
    """Returns the code of Keras' `fit`, `evaluate` or `predict`.

    Keras does not tell who reads a flag; the reader's code does.
    """
    return inspect.unwrap(getattr(_Trainer, kind)).__code__


def frame_of_fit(model: keras.Model, frame: FrameType | None) -> FrameType | None:
    """Returns the frame of Keras' `fit` of a model among the callers of a frame.

    Keras does not tell whether a model is in `fit`.
    """
    code = code_of_loop("fit")
    for caller in _callers(frame):
        if caller.f_code is code and caller.f_locals["self"] is model:
            return caller
    return None


def is_in_loop() -> bool:
    """Returns whether Keras' `fit`, `evaluate` or `predict` is among the callers."""
    codes = [code_of_loop(kind) for kind in ("fit", "evaluate", "predict")]
    return any(caller.f_code in codes for caller in _callers(inspect.currentframe()))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame, and the frames of its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def strategy_at_creation(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy that a model was created under, if any.

    The public `distribute_strategy` falls back to the current strategy.
    """
    return model._distribute_strategy


def first_epoch(model: keras.Model) -> int:
    """Returns the epoch that a callback has set for `fit` to begin with, or 0."""
    return model._initial_epoch or 0


def set_first_epoch(model: keras.Model, epoch: int) -> None:
    """Makes the `fit` that begins now begin with an epoch.

    The public `initial_epoch` is an argument of `fit`, out of a callback's reach.
    """
    model._initial_epoch = epoch
