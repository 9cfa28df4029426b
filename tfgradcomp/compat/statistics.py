"""Statistics of a model that each replica gathers from its own share of the data.

Keras keeps the moving mean and variance of a normalization by replica. They are not
trained, so no exchange of gradients makes them equal, and each worker would evaluate
and save a model of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compat.comparison import compare


def average_statistics(model: keras.Model, hosts: Any) -> None:
    """Gives all replicas the mean of each statistic that differs between them.

    Seed generators, metrics and integers stay as they are, and so do weights of layers
    that are frozen. All workers must call it.

    Args:
        model: The model.
        hosts: The collectives between the processes; None where there is one.
    """
    strategy = model.distribute_strategy
    variables = _statistics(model)
    components = [
        strategy.experimental_local_results(variable._value) for variable in variables
    ]
    values = [np.stack([c.numpy() for c in own]) for own in components]
    chosen = np.flatnonzero(compare(values, hosts).any(0))
    if not len(chosen):
        return
    own = np.concatenate([values[i].mean(0, np.float64).ravel() for i in chosen])
    if hosts:
        # The mean is taken from a gather: a sum's order could differ between workers.
        rows = hosts.gather(tf.constant(own), f"statistics/{len(own)}").numpy()
        own = rows.mean(0)
    ends = np.cumsum([values[i][0].size for i in chosen])
    for i, mean in zip(chosen, np.split(own, ends[:-1]), strict=True):
        for component in components[i]:
            shaped = tf.constant(mean.reshape(component.shape))
            component.assign(tf.cast(shaped, component.dtype))


def digest_of_weights(model: keras.Model) -> str:
    """Returns a hash of all that is trained, frozen or not."""
    digest = hashlib.sha256()
    for variable in _own(model, "_trainable_variables"):
        if not variable.overwrite_with_gradient:
            digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


def _statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns floating variables that are not trained, and scales of float8 layers.

    A layer's own lists are asked, since `trainable=False` freezes what is trained. The
    states of a stateful layer belong to the rows of its batch.
    """
    kept = _own(model, "_non_trainable_variables", leaves_states=True)
    trained = _own(model, "_trainable_variables")
    scales = [v for v in trained if v.overwrite_with_gradient]
    return [*(v for v in kept if tf.as_dtype(v.dtype).is_floating), *scales]


def _own(
    model: keras.Model, name: str, leaves_states: bool = False
) -> Iterable[keras.Variable]:
    layers = model._flatten_layers()
    if leaves_states:
        layers = [one for one in layers if not getattr(one, "stateful", False)]
    found = {id(v): v for layer in layers for v in getattr(layer, name)}
    return found.values()
