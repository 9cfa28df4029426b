"""State of a training run that Keras' files of weights lack.

It consists of the states of random numbers, the metrics of an unfinished epoch, and
values that differ between the local replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import keras
import numpy as np

from tfgradcomp.compat.seeds import global_seed_generator
from tfgradcomp.compat.variables import tensorflow_variable
from tfgradcomp.fit.seeds import seed_states
from tfgradcomp.fit.statistics import statistics_of


class RunState:
    """Reads and writes this state of a model, with a value for each local replica.

    All workers must create it; its methods are local to a worker.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        with model.distribute_strategy.scope():
            # All workers create it here and agree on its first value.
            self._global = global_seed_generator().state

    def read(self) -> dict[str, np.ndarray]:
        """Returns the values of local replicas, `[local replicas, ...]`, by name."""
        return {
            name: np.stack([one.numpy() for one in self._components(variable)])
            for name, variable in {**self._lasting, **self._metrics()}.items()
        }

    def assign(self, values: Mapping[str, np.ndarray]) -> bool:
        """Assigns values to all variables except metrics, whose epoch begins later.

        Args:
            values: The result of `read`.

        Returns:
            Whether there was a value for each variable.
        """
        return self._assign(self._lasting, values)

    def assign_metrics(self, values: Mapping[str, np.ndarray]) -> bool:
        """Assigns values to the metrics, once the epoch has begun.

        Returns:
            Whether there was a value for each metric.
        """
        return self._assign(self._metrics(), values)

    @functools.cached_property
    def _lasting(self) -> dict[str, keras.Variable]:
        # The first use is after the model is built.
        found = {**seed_states(self._model), "global": self._global}
        for index, variable in enumerate(statistics_of(self._model)):
            if len(self._components(variable)) > 1:
                found[f"statistics/{index}"] = variable
        return found

    def _metrics(self) -> dict[str, keras.Variable]:
        pairs = enumerate(self._model.metrics_variables)
        return {f"metrics/{index}": variable for index, variable in pairs}

    def _components(self, variable: keras.Variable) -> tuple:
        results_of = self._model.distribute_strategy.experimental_local_results
        return results_of(tensorflow_variable(variable))

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
                # A converted backup may have fewer local replicas.
                component.assign(rows[min(index, len(rows) - 1)])
        return True
