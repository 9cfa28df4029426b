"""Signals between the workers, by which their loops begin and end together."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

_END_OF_LOOP, _END_OF_PROCESS = 1, 2


class Signals:
    """A few flags for each worker, in a few variables of this process.

    Args:
        hosts: The collectives between the processes.
    """

    def __init__(self, hosts: Any):
        self.hosts = hosts
        self.num_workers, self.rank = hosts.num_workers, hosts.rank
        self._requests = 0
        hosts.watch()
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = tf.zeros([self.num_workers])
            # `tf.Variable` would be one of the strategy's, whose copies are equal.
            self._own, self._all, self._ended = (
                ResourceVariable(zeros, trainable=False) for _ in range(3)
            )

    def begin(self, value: bool) -> None:
        """Forgets the signals of another loop.

        Args:
            value: Whether this worker asks for the end of the new one.
        """
        self.request(value)
        self._all.assign(tf.zeros([self.num_workers]))
        self._ended.assign(tf.zeros([self.num_workers]))

    def request(self, value: bool) -> None:
        """Asks for the end of the loop, or takes that back."""
        self._set(_END_OF_LOOP, value)

    def request_end_of_process(self, value: bool) -> None:
        """Asks all workers to save and end, or takes that back."""
        self._set(_END_OF_PROCESS, value)

    def _set(self, flag: int, value: bool) -> None:
        self._requests = self._requests & ~flag | (flag if value else 0)
        own = tf.one_hot(self.rank, self.num_workers) * float(self._requests)
        self._own.assign(own)

    def travel_with(self, vector: tf.Tensor, call_site: str) -> tf.Tensor:
        """Returns the sum of a vector over the workers; the flags travel behind it."""
        joined = tf.concat([vector, self._own.read_value()], 0)
        size = joined.shape[0]
        total = self.hosts.sum(joined, f"{call_site}/{size}")
        vector, flags = tf.split(total, [size - self.num_workers, self.num_workers])
        self._all.assign(flags)
        return vector

    def gather(self, row: list[int]) -> np.ndarray:
        """Returns the rows of all workers."""
        site = f"lockstep/{len(row)}"
        return self.hosts.gather(tf.constant(row, tf.int64), site).numpy()

    def end(self, counts: tf.Tensor, full: int) -> None:
        """Notes which workers miss rows that others have.

        Args:
            counts: int64 `[N]`, the replicas with rows of each worker.
            full: The number of replicas of a worker.
        """
        is_short = (counts < full) & tf.reduce_any(counts > 0)
        self._ended.assign(tf.cast(is_short, tf.float32))

    def askers(self) -> list[int]:
        """Returns the workers that ask for the end of the loop, as all of them know."""
        return self._with(_END_OF_LOOP)

    def leavers(self) -> list[int]:
        """Returns the workers that have to end soon, as all of them know."""
        return self._with(_END_OF_PROCESS)

    def _with(self, flag: int) -> list[int]:
        return np.flatnonzero(self._all.numpy().astype(int) & flag).tolist()

    def ended(self) -> list[int]:
        """Returns the workers that missed rows when the last pass ended."""
        return np.flatnonzero(self._ended.numpy()).tolist()
