"""State of a training that Keras keeps in no file of weights.

The states of random numbers, the metrics of an epoch that is not over, and what local
replicas have each for themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import keras
import numpy as np
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable

from tfgradcomp.compat.statistics import statistics_of


class RunState:
    """Reads and writes this state of a model, each local replica's own.

    All workers must create it; all else is local to a worker.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        with model.distribute_strategy.scope():
            # Created here, by all workers: they agree on a new variable's first value.
            shared = seed_generator.global_seed_generator()
        self._shared = shared.state

    def read(self) -> dict[str, np.ndarray]:
        """Returns the values of local replicas, `[local replicas, ...]`, by name."""
        return {
            name: np.stack([one.numpy() for one in self._components(variable)])
            for name, variable in {**self._lasting, **self._metrics()}.items()
        }

    def assign(self, values: Mapping[str, np.ndarray]) -> bool:
        """Gives the variables other values; those of metrics wait for their epoch.

        Args:
            values: What `read` returned.

        Returns:
            Whether there was a value for each.
        """
        return self._assign(self._lasting, values)

    def assign_metrics(self, values: Mapping[str, np.ndarray]) -> bool:
        """Gives the metrics other values, once the epoch has begun.

        Returns:
            Whether there was a value for each.
        """
        return self._assign(self._metrics(), values)

    @functools.cached_property
    def _lasting(self) -> dict[str, keras.Variable]:
        # The first use is after the model is built.
        found = {**seed_states(self._model), "global": self._shared}
        for index, variable in enumerate(statistics_of(self._model)):
            if len(self._components(variable)) > 1:
                found[f"statistics/{index}"] = variable
        return found

    def _metrics(self) -> dict[str, keras.Variable]:
        pairs = enumerate(self._model.metrics_variables)
        return {f"metrics/{index}": variable for index, variable in pairs}

    def _components(self, variable: keras.Variable) -> tuple:
        results_of = self._model.distribute_strategy.experimental_local_results
        return results_of(variable._value)

    def _assign(
        self, variables: Mapping[str, keras.Variable], values: Mapping[str, np.ndarray]
    ) -> bool:
        chosen = [(v, values[name]) for name, v in variables.items() if name in values]
        if len(chosen) < len(variables) or any(
            v.shape != rows.shape[1:] for v, rows in chosen
        ):
            return False
        for variable, rows in chosen:
            for index, component in enumerate(self._components(variable)):
                # A backup that was converted may have fewer local replicas.
                component.assign(rows[min(index, len(rows) - 1)])
        return True


def seed_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of seed generators by where they are in the model.

    Attributes and layers lead there, as in Keras' files of weights. The path of the
    variable will not do: it counts what the process has created before.
    """
    found: dict[int, tuple[str, keras.random.SeedGenerator]] = {}
    _visit(model, "seeds", {}, found)
    return {path: generator.state for path, generator in found.values()}


def _visit(item, path, visited, found):
    if isinstance(item, keras.random.SeedGenerator):
        found.setdefault(id(item), (path, item))
        return
    if id(item) in visited:
        return
    if isinstance(item, KerasSaveable):
        children: Iterable = saving_lib._walk_saveable(item)
    elif isinstance(item, (list, tuple, dict)):
        children = _numbered(item.values() if isinstance(item, dict) else item)
    else:
        return
    # Kept, so that nothing else gets its id.
    visited[id(item)] = item
    for name, child in children:
        _visit(child, f"{path}/{name}", visited, found)


def _numbered(items):
    """Returns pairs of a name and an item: its class, and how many came before."""
    counts: dict[str, int] = {}
    for item in items:
        kind = type(item).__name__
        counts[kind] = counts.get(kind, -1) + 1
        yield f"{kind}_{counts[kind]}", item
