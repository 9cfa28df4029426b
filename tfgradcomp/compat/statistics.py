"""Statistics of a model that each replica gathers from its own share of the data.

Keras keeps the moving mean and variance of a normalization by replica. They are not
trained, so no exchange of gradients makes them equal, and each worker would evaluate
and save a model of its own. So would one whose callbacks restore weights or set a
learning rate by what this worker alone sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compat.comparison import compare
from tfgradcomp.compat.trainer import optimizers_of


def average_statistics(model: keras.Model, hosts: Any) -> None:
    """Gives all replicas the mean of each statistic that differs between them.

    Seed generators, metrics and integers stay as they are, and so do weights of layers
    that are frozen. All workers must call it.

    Args:
        model: The model.
        hosts: The collectives between the processes; None where there is one.
    """
    unequal = _Unequal.find(model, statistics_of(model), hosts)
    if not unequal.values:
        return
    # One table: added up in the same way for replicas and for processes.
    table = [v.reshape(len(v), -1).astype("float64") for v in unequal.values]
    own = np.concatenate(table, 1).mean(0)
    if hosts:
        # The mean is taken from a gather: a sum's order could differ between workers.
        rows = hosts.gather(tf.constant(own), f"statistics/{len(own)}").numpy()
        own = rows.mean(0)
    unequal.assign(own)


def take_first_worker(model: keras.Model, hosts: Any) -> list[str]:
    """Gives all workers what worker 0 has, where callbacks have made them differ.

    A callback may restore weights or set a learning rate by what its own worker alone
    sees, such as a metric or a clock. All workers must call it.

    Args:
        model: The model.
        hosts: The collectives between the processes.

    Returns:
        The paths of the variables that differed.
    """
    everything = [
        *_own(model, "_trainable_variables"),
        *statistics_of(model),
        *_learning_rates(model),
    ]
    variables = list({id(variable): variable for variable in everything}.values())
    unequal = _Unequal.find(model, variables, hosts)
    if unequal.values:
        own = np.concatenate([v[0].ravel().astype("float64") for v in unequal.values])
        rows = hosts.gather(tf.constant(own), f"statistics/{len(own)}").numpy()
        unequal.assign(rows[0])
    return unequal.paths


def digest_of_weights(model: keras.Model) -> str:
    """Returns a hash of all that is trained, frozen or not."""
    digest = hashlib.sha256()
    for variable in _own(model, "_trainable_variables"):
        if not variable.overwrite_with_gradient:
            digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """Returns floating variables that are not trained, and scales of float8 layers.

    A layer's own lists are asked, since `trainable=False` freezes what is trained. The
    states of a stateful layer belong to the rows of its batch.
    """
    kept = _own(model, "_non_trainable_variables", leaves_states=True)
    trained = _own(model, "_trainable_variables")
    scales = [v for v in trained if v.overwrite_with_gradient]
    return [*(v for v in kept if tf.as_dtype(v.dtype).is_floating), *scales]


def _learning_rates(model: keras.Model) -> list[keras.Variable]:
    """Returns the learning rates of a model's optimizers that are no schedules."""
    variables = [v for one in optimizers_of(model) for v in one.variables]
    return [v for v in variables if getattr(v, "name", None) == "learning_rate"]


def _own(
    model: keras.Model, name: str, leaves_states: bool = False
) -> Iterable[keras.Variable]:
    layers = model._flatten_layers()
    if leaves_states:
        layers = [one for one in layers if not getattr(one, "stateful", False)]
    found = {id(v): v for layer in layers for v in getattr(layer, name)}
    return found.values()


class _Unequal(NamedTuple):
    """The variables that any two replicas have different values of.

    Attributes:
        paths: Their paths.
        components: Their variables on the local replicas.
        values: What these hold, an array `[local replicas, ...]` for each.
    """

    paths: list[str]
    components: list[tuple]
    values: list[np.ndarray]

    @classmethod
    def find(cls, model: keras.Model, variables: list, hosts: Any) -> _Unequal:
        """Compares the replicas; all workers must call it."""
        results_of = model.distribute_strategy.experimental_local_results
        components = [results_of(variable._value) for variable in variables]
        values = [np.stack([c.numpy() for c in own]) for own in components]
        chosen = np.flatnonzero(compare(values, hosts).any(0))
        return cls(
            [variables[i].path for i in chosen],
            [components[i] for i in chosen],
            [values[i] for i in chosen],
        )

    def assign(self, flat: np.ndarray) -> None:
        """Gives all local replicas the numbers of one flat vector."""
        ends = np.cumsum([value[0].size for value in self.values])
        parts = np.split(flat, ends[:-1])
        for own, part in zip(self.components, parts, strict=True):
            for component in own:
                shaped = tf.constant(part.reshape(component.shape))
                component.assign(tf.cast(shaped, component.dtype))
