"""Models that a user names, and the time that a step of one takes here."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.assignment.models import layers_of
from tfgradcomp.planning.shapes import MODELS, Shapes

_STEPS = 7


class NamedModel(NamedTuple):
    """A model that a user has named, and its shapes.

    Attributes:
        name: As the user has written it.
        shapes: Of its trainable variables.
        model: The Keras model; None of a list of shapes.
    """

    name: str
    shapes: Shapes
    model: keras.Model | None = None

    @property
    def notes(self) -> list[str]:
        """Sentences about what is not modelled of it."""
        layers = layers_of(self.model) if self.model else []
        has_tables = self.name == "bert" or any(
            isinstance(layer, keras.layers.Embedding) for layer in layers
        )
        if not has_tables:
            return []
        return [
            "Embeddings are counted as dense; in training only the rows travel that a "
            "batch touches."
        ]

    def keras_model(self) -> keras.Model:
        """Returns the model, for a measurement.

        Raises:
            ValueError: If there are shapes only.
        """
        if self.model is None:
            raise ValueError(
                f"--measure needs a model that can run, and {self.name} is a list of "
                "shapes: give --compute-ms, a .keras file or module:function. "
                f"Received: model={self.name!r}"
            )
        return self.model


def find_model(name: str) -> NamedModel:
    """Returns what a name stands for.

    Args:
        name: A name in `MODELS`, a saved file, or `module:function`.

    Raises:
        ValueError: If there is no such model, or it has no trainable variables.
    """
    if name in MODELS:
        return NamedModel(name, MODELS[name]())
    if name.endswith((".keras", ".h5")):
        if not Path(name).is_file():
            raise ValueError(f"There is no such file. Received: model={name!r}")
        model = keras.saving.load_model(name, compile=False)
    elif ":" in name:
        model = _call(name)
    else:
        raise ValueError(
            f"model must be one of {[*MODELS]}, a .keras file, or module:function. "
            f"Received: model={name!r}"
        )
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    if not shapes:
        raise ValueError(
            "The model has no trainable variables: build it, for example with a "
            f"keras.Input. Received: model={name!r}"
        )
    return NamedModel(name, shapes, model)


def measure_compute(model: keras.Model, batch_size: int) -> float:
    """Measures a step of one worker: forward pass, backward pass, and SGD's update.

    Args:
        model: A built model with inputs of known shapes.
        batch_size: Examples of a step.

    Returns:
        Seconds, the median of some steps after the first.

    Raises:
        ValueError: If an input's shape is not known.
    """
    inputs = [_input(tensor, batch_size) for tensor in model.inputs]
    optimizer = keras.optimizers.SGD(0.0)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            outputs = model(inputs if len(inputs) > 1 else inputs[0], training=True)
            flat = tf.nest.flatten(outputs)
            loss = tf.add_n([tf.reduce_mean(tf.cast(y, tf.float32) ** 2) for y in flat])
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    step().numpy()
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        step().numpy()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _input(tensor, batch_size):
    shape = [batch_size, *tensor.shape[1:]]
    if None in shape:
        raise ValueError(
            "--measure needs inputs of known shapes: give --compute-ms, or build the "
            f"model with a fixed keras.Input. Received: shape={tuple(tensor.shape)}"
        )
    if tf.as_dtype(tensor.dtype).is_floating:
        values = np.random.default_rng(0).normal(size=shape)
        return tf.constant(values, tensor.dtype)
    return tf.zeros(shape, tensor.dtype)


def _call(name: str) -> keras.Model:
    module_name, _, function_name = name.partition(":")
    # As `python -m` would find it.
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            "model names a function as module:function, found from this folder or "
            f"installed: {error}. Received: model={name!r}"
        ) from None
    finally:
        sys.path.remove("")
    model = function()
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"The function must return a Keras model. Received: {type(model).__name__} "
            f"of model={name!r}"
        )
    return model
