"""Variables that differ between workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compat.strategy import first_values_unsent


class PerReplicaVariable(keras.Variable):
    """A variable with another value on each replica.

    Keras has no such variable. TensorFlow aggregates its `on_read` variables whenever
    they are read outside of a step, which takes all workers. Here reading and saving
    use local values only, so that a worker can save alone.

    Args:
        value: Tensor, the first value on every replica. TensorFlow sends the value of
            the first worker to the others.
        name: Name of the variable.
        is_known: Whether all workers give the same value, so that it need not be sent.
    """

    def __init__(self, value: tf.Tensor, name: str, is_known: bool = False):
        self._strategy = tf.distribute.get_strategy()
        self._read: Callable | None = None
        self._write: Callable | None = None
        with first_values_unsent(self._strategy) if is_known else nullcontext():
            super().__init__(
                lambda shape, dtype: value,
                shape=value.shape,
                dtype=value.dtype.name,
                trainable=False,
                # Reads do not aggregate, but a restored value goes to all replicas.
                aggregation="only_first_replica",
                synchronization="on_read",
                name=name,
            )

    @classmethod
    def known(cls, value: tf.Tensor, name: str) -> PerReplicaVariable:
        """Creates a variable whose first value all workers know; it is not sent."""
        return cls(value, name, is_known=True)

    def delegate_to(self, read: Callable, write: Callable) -> None:
        """Replaces `local_values` and `assign_local_values`, also when saving."""
        self._read, self._write = read, write

    def _locals(self):
        return self._strategy.experimental_local_results(self.value)

    def local_values(self) -> np.ndarray:
        """Returns this worker's values, with a leading axis of local replicas."""
        if self._read:
            return self._read()
        return np.stack([value.numpy() for value in self._locals()])

    def assign_local_values(self, values: np.ndarray) -> None:
        """Assigns a value to each local replica, in the order of `local_values`."""
        if self._write:
            self._write(values)
            return
        for variable, value in zip(self._locals(), values, strict=True):
            variable.assign(value)

    def rows_at(self, rows: tf.Tensor, width: int) -> tf.Tensor:
        """Reads rows of `width` elements of a table, which is held as a vector.

        Returns:
            The rows' elements, as a vector. No other rows are read.
        """
        return tf.raw_ops.ResourceGather(
            resource=self.value.handle,
            indices=_elements_of(rows, width),
            dtype=self.dtype,
        )

    def assign_rows(self, rows: tf.IndexedSlices) -> None:
        """Assigns rows of a table, which is held as a vector."""
        elements = _elements_of(rows.indices, rows.values.shape[1])
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=self.value.handle,
            indices=elements[:, tf.newaxis],
            updates=tf.cast(tf.reshape(rows.values, [-1]), self.dtype),
        )

    def numpy(self):
        """Returns the value of the first local replica."""
        return self.local_values()[0]

    def _serialize_to_tensors(self):
        if self._read:
            return {"VARIABLE_VALUE": tf.constant(self._read())}
        return {"VARIABLE_VALUE": tf.stack([v.read_value() for v in self._locals()])}

    def _restore_from_tensors(self, restored_tensors):
        self.assign_local_values(tf.unstack(restored_tensors["VARIABLE_VALUE"]))
        return self.value


def _elements_of(rows, width):
    """Returns the elements' indices in a vector, which may be longer than 2**31."""
    begins = tf.cast(rows, tf.int64)[:, tf.newaxis] * width
    return tf.reshape(begins + tf.range(width, dtype=tf.int64), [-1])
