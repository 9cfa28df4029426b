"""Models that a user names, and the duration of their steps on this machine."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.assignment.models import layers_of
from tfgradcomp.planning.shapes import MODELS, Shapes

_STEPS = 7


def find_model(name: str) -> tuple[Shapes, keras.Model | None]:
    """Returns the shapes of a model's trainable variables, and the model.

    Args:
        name: A name in `MODELS`, whose models are known by their shapes alone, a saved
            file, or `module:function`.

    Raises:
        ValueError: If there is no such model, or it has no trainable variables.
    """
    if name in MODELS:
        return MODELS[name](), None
    if name.endswith((".keras", ".h5")):
        if not Path(name).is_file():
            raise ValueError(f"The file does not exist. Received: model={name!r}")
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
            "The model has no trainable variables. Build it, for example with a "
            f"keras.Input. Received: model={name!r}"
        )
    return shapes, model


def has_embeddings(name: str, model: keras.Model | None) -> bool:
    """Returns whether a model that `find_model` has found contains embeddings."""
    layers = layers_of(model) if model else []
    return name == "bert" or any(isinstance(x, keras.layers.Embedding) for x in layers)


def measure_compute(model: keras.Model, batch_size: int) -> float:
    """Measures a step of one worker: forward pass, backward pass and SGD's update.

    Args:
        model: A built model with inputs of known shapes.
        batch_size: Number of examples.

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
            "--measure needs inputs of known shapes. Give --compute-ms, or build the "
            f"model with a fixed keras.Input. Received: shape={tuple(tensor.shape)}"
        )
    if tf.as_dtype(tensor.dtype).is_floating:
        values = np.random.default_rng(0).normal(size=shape)
        return tf.constant(values, tensor.dtype)
    return tf.zeros(shape, tensor.dtype)


def _call(name: str) -> keras.Model:
    module_name, _, function_name = name.partition(":")
    # The same search path as with `python -m`.
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            "model must name a function as module:function, in this folder or "
            f"installed: {error}. Received: model={name!r}"
        ) from None
    finally:
        sys.path.remove("")
    model = function()
    if not isinstance(model, keras.Model):
        raise ValueError(
            "The function must return a Keras model. "
            f"Received: model={name!r}, which returned {type(model).__name__}"
        )
    return model
