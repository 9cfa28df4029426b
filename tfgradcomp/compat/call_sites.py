"""Counters of the collectives that this process has entered and left, by call sites."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

# A counter holds the calls that were left above those that were entered.
_LEFT = 1 << 32


class Calls(NamedTuple):
    """The calls of one site: how many were entered, and how many were left."""

    entered: int
    left: int


class CallSites:
    """Counters on the CPU, which a graph adds to and another thread reads."""

    def __init__(self):
        self._counters: dict[tuple[str, int], ResourceVariable] = {}
        self._lock = threading.Lock()

    def around(
        self, site: str, call: Callable, vector: tf.Tensor, member: int = 0
    ) -> tf.Tensor:
        """Returns `call(vector)`, counted: entered when the vector is there.

        Args:
            site: Name of the call site, equal on all workers.
            call: Function of a tensor, which waits for the other workers.
            vector: Its argument.
            member: Index of the replica that calls.
        """
        # What shares a counter is put into one sequence: neither the sites nor the
        # replicas of a process may wait for each other.
        counter = self._counter(site, member)
        with tf.control_dependencies([vector]):
            entered = counter.assign_add(1, read_value=False)
        with tf.control_dependencies([entered]):
            vector = tf.identity(vector)
        result = call(vector)
        with tf.control_dependencies([result]):
            counter.assign_add(_LEFT, read_value=False)
        return result

    @contextlib.contextmanager
    def within(self, site: str) -> Iterator[None]:
        """Counts a call that waits for the other workers outside of graphs."""
        counter = self._counter(site, 0)
        counter.assign_add(1)
        try:
            yield
        finally:
            counter.assign_add(_LEFT)

    def leave(self) -> None:
        """Counts as left what was entered, after an error that has ended it."""
        with self._lock:
            for counter in self._counters.values():
                entered = int(counter.numpy()) % _LEFT
                counter.assign(entered * (_LEFT + 1))

    def calls(self) -> dict[str, Calls]:
        """Returns the calls so far of all replicas of this process, by sites."""
        with self._lock:
            counters = dict(self._counters)
        totals: dict[str, int] = {}
        for (site, _), counter in counters.items():
            totals[site] = totals.get(site, 0) + int(counter.numpy())
        return {site: Calls(n % _LEFT, n // _LEFT) for site, n in totals.items()}

    def _counter(self, *key):
        with self._lock:
            if key not in self._counters:
                with tf.init_scope(), tf.device("CPU:0"):
                    zero = tf.zeros([], tf.int64)
                    # `tf.Variable` would be one of the strategy's.
                    self._counters[key] = ResourceVariable(zero, trainable=False)
            return self._counters[key]


SITES = CallSites()
"""Those of this process."""
