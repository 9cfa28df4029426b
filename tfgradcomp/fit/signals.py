"""Flags that the workers of a loop send each other."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives.replicas import Hosts, across_hosts
from tfgradcomp.collectives.tcp import between_processes
from tfgradcomp.compat.local_variable import local_zeros

_END_OF_LOOP, _END_OF_PROCESS = 1, 2


class LoopSignals:
    """A few flags of each worker, in variables of this process.

    Attributes:
        hosts: The collectives between the processes.
        num_workers: Number of processes.
        rank: Index of this process.
    """

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.num_workers, self.rank = hosts.num_workers, hosts.rank
        self._requests = 0
        hosts.watch()
        self._local, self._all, self._without_rows = (
            local_zeros([self.num_workers], tf.float32) for _ in range(3)
        )

    def begin(self, is_stop_requested: bool) -> None:
        """Clears the signals of another loop.

        Args:
            is_stop_requested: Whether this worker asks for the end of the new loop.
        """
        self.request_stop(is_stop_requested)
        self._all.assign(tf.zeros([self.num_workers]))
        self._without_rows.assign(tf.zeros([self.num_workers]))

    def request_stop(self, value: bool) -> None:
        """Asks for the end of the loop, or withdraws the request."""
        self._set(_END_OF_LOOP, value)

    def request_end_of_process(self, value: bool) -> None:
        """Asks all workers to save and exit, or withdraws the request."""
        self._set(_END_OF_PROCESS, value)

    def _set(self, flag: int, value: bool) -> None:
        self._requests = self._requests & ~flag | (flag if value else 0)
        local = tf.one_hot(self.rank, self.num_workers) * float(self._requests)
        self._local.assign(local)

    def sum(self, vector: tf.Tensor, call_site: str) -> tf.Tensor:
        """Returns the sum of a vector over the workers, of int32 or float32."""
        return between_processes(self.hosts).sum(vector, call_site)

    def sum_with_flags(self, vector: tf.Tensor, call_site: str) -> tf.Tensor:
        """Returns the sum of a vector over the workers; sends the flags behind it."""
        joined = tf.concat([vector, self._local.read_value()], 0)
        size = joined.shape[0]
        total = self.sum(joined, f"{call_site}/{size}")
        vector, flags = tf.split(total, [size - self.num_workers, self.num_workers])
        self._all.assign(flags)
        return vector

    def send_flags(self, call_site: str) -> None:
        """Sends the flags alone."""
        self.sum_with_flags(tf.zeros([0]), call_site)

    def gather(self, row: list[int], call_site: str) -> np.ndarray:
        """Returns the rows of all workers."""
        return self.hosts.gather(tf.constant(row, tf.int64), call_site).numpy()

    def note_missing_rows(self, counts: tf.Tensor, full: int) -> None:
        """Records which workers lack rows that other workers have.

        Args:
            counts: int64 `[N]`, the replicas with rows of each worker.
            full: The number of replicas of a worker.
        """
        is_short = (counts < full) & tf.reduce_any(counts > 0)
        self._without_rows.assign(tf.cast(is_short, tf.float32))

    def stop_requesters(self) -> list[int]:
        """Returns the workers that ask for the end of the loop, as all know them."""
        return self._workers_with(_END_OF_LOOP)

    def preempted_workers(self) -> list[int]:
        """Returns the workers that have to exit soon, as all know them."""
        return self._workers_with(_END_OF_PROCESS)

    def _workers_with(self, flag: int) -> list[int]:
        return np.flatnonzero(self._all.numpy().astype(int) & flag).tolist()

    def workers_without_rows(self) -> list[int]:
        """Returns the workers that lacked rows when the last pass ended."""
        return np.flatnonzero(self._without_rows.numpy()).tolist()


@functools.cache
def signals_of(strategy: tf.distribute.Strategy) -> LoopSignals | None:
    """Returns the signals between a strategy's processes; None for one process."""
    hosts = across_hosts(strategy)
    return None if hosts is None else LoopSignals(hosts)
