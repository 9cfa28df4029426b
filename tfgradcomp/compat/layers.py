"""Keras layers: weights, losses and calls without a public name."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfgradcomp.compat.replace import replace

intercept_layer_calls = partial(replace, keras.Operation, "__call__")
"""Makes Keras call operations by `function(original, operation, *args, **kwargs)`.

Keras has no public hook around a call.
"""

intercept_batch_statistics = partial(
    replace, keras.layers.BatchNormalization, "_moments"
)
"""Replaces a batch's mean and variance by `function(original, layer, *args, **kwargs)`.

The layer has no public method for the statistics alone.
"""


def own_trainable_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns a layer's trainable variables, frozen or not, without inner layers'.

    The public `trainable_variables` includes inner layers and is empty when frozen.
    """
    return layer._trainable_variables


def own_non_trainable_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns a layer's variables that are never trained, without inner layers'.

    The public `non_trainable_variables` includes inner layers and frozen weights.
    """
    return layer._non_trainable_variables


def kernel_of(layer: keras.layers.Layer) -> keras.Variable:
    """Returns the variable of a layer's kernel.

    The public property is a sum of tensors where LoRA is enabled. Depthwise layers have
    nothing but the property.
    """
    return layer._kernel if hasattr(layer, "_kernel") else layer.kernel


def embeddings_of(layer: keras.layers.Embedding) -> keras.Variable:
    """Returns the variable of an embedding layer's table.

    The public property is a sum of tensors where LoRA is enabled.
    """
    return layer._embeddings


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Returns whether the backward pass computes the layer's outputs once more."""
    return layer._remat_mode is not None


def count_added_losses(layer: keras.layers.Layer) -> int:
    """Returns how many losses `add_loss` has given to a layer and the layers in it.

    The public `losses` computes regularization losses, too.
    """
    return sum(len(inner._losses) for inner in layer._flatten_layers())


def flatten_layers(
    layer: keras.layers.Layer, include_self: bool = True
) -> list[keras.layers.Layer]:
    """Returns all layers within a layer or a model, those within layers included.

    The public `layers` ends at the first level.
    """
    return list(layer._flatten_layers(include_self=include_self))


def copy_with_mask(x: Any) -> Any:
    """Returns a copy of a tensor with its Keras mask; anything else as it is.

    Keras keeps masks in a private attribute, which `tf.identity` loses.
    """
    if not tf.is_tensor(x):
        return x
    mask = backend.get_keras_mask(x)
    x = tf.identity(x)
    if mask is not None:
        backend.set_keras_mask(x, mask)
    return x
