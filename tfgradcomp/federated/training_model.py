"""A Keras model as flat vectors: trained weights, statistics, optimizer state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tfgradcomp.federated.anchor import Anchor
from tfgradcomp.federated.description import describe_variables
from tfgradcomp.fit.statistics import statistics_of, trained_variables


class TrainingModel:
    """Reads and writes the variables of a model that hub and clients have in common.

    Args:
        model: A built model.

    Raises:
        ValueError: If nothing is trained, or weights are not float32.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self._trained = model.trainable_variables
        self._statistics = statistics_of(model)
        types = {variable.dtype for variable in self._trained}
        if types != {"float32"}:
            raise ValueError(
                "make_model must return a built model with float32 weights to train; "
                "give it a keras.Input, and the dtype policy 'float32', "
                f"'mixed_float16' or 'mixed_bfloat16'. Received: types={sorted(types)}"
            )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the trained variables."""
        return [tuple(variable.shape) for variable in self._trained]

    def describe(self) -> str:
        """Returns a text that is equal for models that can train together."""
        trained = {id(variable) for variable in self._trained}
        frozen = [v for v in trained_variables(self.model) if id(v) not in trained]
        digest = hashlib.sha256()
        for variable in frozen:
            digest.update(variable.numpy().tobytes())
        name = digest.hexdigest() if frozen else ""
        return describe_variables(self._trained, self._statistics, name)

    def take(self, anchor: Anchor) -> None:
        """Assigns the weights and the statistics of an anchor."""
        _assign(self._trained, anchor.weights)
        _assign(self._statistics, anchor.statistics)

    @property
    def weights(self) -> np.ndarray:
        """The trained variables, float32 `[size]`."""
        return _joined(self._trained)

    @property
    def statistics(self) -> np.ndarray:
        """The statistics of normalization layers, float32 `[count]`."""
        return _joined(self._statistics)


def optimizer_arrays(optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
    """Returns the variables of an optimizer by names for a file."""
    return {f"inner.{i}": v.numpy() for i, v in enumerate(optimizer.variables)}


def restore_optimizer(
    optimizer: keras.optimizers.Optimizer, arrays: Mapping[str, np.ndarray]
) -> None:
    """Assigns the variables of a built optimizer.

    Raises:
        ValueError: If the arrays are those of another optimizer.
    """
    saved = [
        arrays[k] for k in (f"inner.{i}" for i in range(len(arrays))) if k in arrays
    ]
    expected = [tuple(variable.shape) for variable in optimizer.variables]
    if [array.shape for array in saved] != expected:
        raise ValueError(
            "The client's folder has the state of another inner optimizer. Give the "
            f"one of before, or a new folder. Received: {type(optimizer).__name__} "
            f"with {len(expected)} variables, {len(saved)} in the folder"
        )
    for variable, array in zip(optimizer.variables, saved, strict=True):
        variable.assign(array)


def _joined(variables: Sequence[keras.Variable]) -> np.ndarray:
    parts = [variable.numpy().astype(np.float32).ravel() for variable in variables]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _assign(variables: Sequence[keras.Variable], values: np.ndarray) -> None:
    begin = 0
    for variable in variables:
        end = begin + int(np.prod(variable.shape))
        variable.assign(values[begin:end].reshape(variable.shape))
        begin = end
