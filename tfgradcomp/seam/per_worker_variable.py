"""Variables that differ between workers."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


class PerWorkerVariable(keras.Variable):
    """A variable of which each replica has its own value.

    TensorFlow aggregates such a variable whenever it is read outside of a step, which
    takes all workers. Here reading and saving take local values only, so that one
    worker can save by itself.

    Args:
        value: Tensor, the first value on every replica.
        name: Name of the variable.
    """

    def __init__(self, value: tf.Tensor, name: str):
        self._strategy = tf.distribute.get_strategy()
        super().__init__(
            lambda shape, dtype: value,
            shape=value.shape,
            dtype=value.dtype.name,
            trainable=False,
            # Nothing is to be aggregated; but a restored value goes to all replicas.
            aggregation="only_first_replica",
            synchronization="on_read",
            name=name,
        )

    def _locals(self):
        return self._strategy.experimental_local_results(self.value)

    def local_values(self) -> np.ndarray:
        """Returns this worker's values, with a leading axis of local replicas."""
        return np.stack([value.numpy() for value in self._locals()])

    def assign_local_values(self, values: np.ndarray) -> None:
        """Assigns one value to each local replica, in the order of `local_values`."""
        for variable, value in zip(self._locals(), values, strict=True):
            variable.assign(value)

    def numpy(self):
        """Returns the value of the first local replica."""
        return self._locals()[0].numpy()

    def _serialize_to_tensors(self):
        return {"VARIABLE_VALUE": tf.stack([v.read_value() for v in self._locals()])}

    def _restore_from_tensors(self, restored_tensors):
        self.assign_local_values(tf.unstack(restored_tensors["VARIABLE_VALUE"]))
        return self.value
