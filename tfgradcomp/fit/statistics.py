"""Values that differ between replicas although no gradient exchange concerns them.

Keras keeps the moving mean and variance of a normalization by replica. They are not
trained, so each worker would evaluate and save a model of its own. The same holds for
weights and learning rates that a callback sets by a worker's own view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives.base import Collectives
from tfgradcomp.collectives.comparison import compare
from tfgradcomp.compat.assignments import note_assignment
from tfgradcomp.compat.layers import (
    flatten_layers,
    own_non_trainable_variables,
    own_trainable_variables,
)
from tfgradcomp.compat.variables import tensorflow_variable
from tfgradcomp.fit.wrappers import optimizers_of


def average_statistics(model: keras.Model, hosts: Collectives | None) -> None:
    """Assigns to all replicas the mean of each statistic that differs between them.

    Seed generators, metrics and integers are left as they are, and so are the weights
    of frozen layers. All workers must call it.

    Args:
        model: The model.
        hosts: The collectives between the processes; None for a single process.
    """
    unequal = _Unequal.find(model, statistics_of(model), hosts)
    if not unequal.values:
        return
    # One table, so that replicas and processes are added up in the same way.
    table = [v.reshape(len(v), -1).astype("float64") for v in unequal.values]
    mean = np.concatenate(table, 1).mean(0)
    if hosts:
        # The mean of a gather: a sum's order could differ between workers.
        rows = hosts.gather(tf.constant(mean), f"statistics/{len(mean)}").numpy()
        mean = rows.mean(0)
    unequal.assign(mean)


def copy_first_worker(model: keras.Model, hosts: Collectives) -> list[str]:
    """Assigns worker 0's values to all workers, where callbacks made them differ.

    A callback may restore weights or set a learning rate by a metric or a clock of its
    own worker. All workers must call it.

    Args:
        model: The model.
        hosts: The collectives between the processes.

    Returns:
        The paths of the variables that differed.
    """
    everything = [
        *trained_variables(model),
        *statistics_of(model),
        *_learning_rates(model),
    ]
    variables = list({id(variable): variable for variable in everything}.values())
    unequal = _Unequal.find(model, variables, hosts)
    if unequal.values:
        first = np.concatenate([v[0].ravel().astype("float64") for v in unequal.values])
        rows = hosts.gather(tf.constant(first), f"statistics/{len(first)}").numpy()
        unequal.assign(rows[0])
    return [variable.path for variable in unequal.variables]


def trained_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the trained variables of all layers, frozen or not."""
    return _variables(model, own_trainable_variables)


def digest_of_weights(model: keras.Model) -> str:
    """Returns a hash of all trained variables, frozen or not."""
    digest = hashlib.sha256()
    for variable in trained_variables(model):
        if not variable.overwrite_with_gradient:
            digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating variables that are not trained, and float8 layers' scales.

    The lists of each layer are read, since `trainable=False` freezes trained variables.
    The states of a stateful layer are left out: they belong to the rows of its batch.
    """
    kept = _variables(model, own_non_trainable_variables, with_stateful=False)
    trained = trained_variables(model)
    scales = [v for v in trained if v.overwrite_with_gradient]
    return [*(v for v in kept if tf.as_dtype(v.dtype).is_floating), *scales]


def _learning_rates(model: keras.Model) -> list[keras.Variable]:
    """Returns the learning rates of a model's optimizers, except for schedules."""
    variables = [v for one in optimizers_of(model) for v in one.variables]
    return [v for v in variables if getattr(v, "name", None) == "learning_rate"]


def _variables(
    model: keras.Model,
    variables_of: Callable[[keras.layers.Layer], list[keras.Variable]],
    with_stateful: bool = True,
) -> list[keras.Variable]:
    """Returns variables of all layers of a model, each once."""
    layers = [
        layer
        for layer in flatten_layers(model)
        if with_stateful or not getattr(layer, "stateful", False)
    ]
    found = {id(v): v for layer in layers for v in variables_of(layer)}
    return [*found.values()]


class _Unequal(NamedTuple):
    """The variables whose values differ between any two replicas.

    Attributes:
        variables: The variables.
        components: Their variables on the local replicas.
        values: The values of these, an array `[local replicas, ...]` for each.
    """

    variables: list[keras.Variable]
    components: list[tuple]
    values: list[np.ndarray]

    @classmethod
    def find(
        cls, model: keras.Model, variables: list, hosts: Collectives | None
    ) -> _Unequal:
        """Compares the replicas; all workers must call it."""
        results_of = model.distribute_strategy.experimental_local_results
        components = [results_of(tensorflow_variable(v)) for v in variables]
        is_other = compare(([c.numpy() for c in local] for local in components), hosts)
        chosen = np.flatnonzero(is_other.any(0))
        return cls(
            [variables[i] for i in chosen],
            [components[i] for i in chosen],
            [np.stack([c.numpy() for c in components[i]]) for i in chosen],
        )

    def assign(self, flat: np.ndarray) -> None:
        """Assigns the parts of one flat vector to all local replicas."""
        ends = np.cumsum([value[0].size for value in self.values])
        parts = np.split(flat, ends[:-1])
        for local, part in zip(self.components, parts, strict=True):
            for component in local:
                shaped = tf.constant(part.reshape(component.shape))
                component.assign(tf.cast(shaped, component.dtype))
        for variable in self.variables:
            note_assignment(variable)
