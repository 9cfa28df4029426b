"""The model and the layers that own an optimizer's variables."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import keras

from tfgradcomp.compat.layers import flatten_layers, own_trainable_variables


def find_model(variables: Iterable[keras.Variable]) -> keras.Model | None:
    """Returns the model whose trainable variables are exactly these, if there is one.

    Keras hands an optimizer its variables, but not the model.
    """
    wanted = [id(variable) for variable in variables]
    for candidate in gc.get_objects():
        if issubclass(type(candidate), keras.Model) and candidate.built:
            if [id(v) for v in candidate.trainable_variables] == wanted:
                return candidate
    return None


def model_compiled_with(optimizer: keras.optimizers.Optimizer) -> keras.Model | None:
    """Returns the model that was compiled with an optimizer, if there is one."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), keras.Model):
            own = vars(candidate).get("optimizer")
            # A `LossScaleOptimizer` holds the wrapper as its inner optimizer.
            if optimizer in (own, getattr(own, "inner_optimizer", None)):
                return candidate
    return None


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers of a model, those within layers included."""
    return flatten_layers(model, include_self=False)


def owners_of(model: keras.Model) -> dict[int, keras.layers.Layer]:
    """Returns the layer that made each trainable variable, by the variable's id."""
    return {
        id(variable): layer
        for layer in flatten_layers(model)
        for variable in own_trainable_variables(layer)
    }


def last_layer(model: keras.Model) -> keras.layers.Layer | None:
    """Returns the last layer with trainable variables; of a nested model, its last."""
    for layer in reversed(model.layers):
        if layer.trainable_variables:
            return last_layer(layer) if isinstance(layer, keras.Model) else layer
    return None
