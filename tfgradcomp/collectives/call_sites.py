"""Counters of the collectives that this process has entered and left, by call site."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.compat.local_variable import local_zeros

# A counter holds the calls left above the calls entered.
_LEFT = 1 << 32


class Calls(NamedTuple):
    """Numbers of calls of one site that were entered and left."""

    entered: int
    left: int


class CallSites:
    """Counters on the CPU that graphs increment and another thread reads."""

    def __init__(self):
        self._counters: dict[tuple[str, int], tf.Variable] = {}
        self._lock = threading.Lock()

    def around(
        self, site: str, call: Callable, vector: tf.Tensor, member: int = 0
    ) -> tf.Tensor:
        """Returns `call(vector)` and counts the call; it is entered with its argument.

        Args:
            site: Name of the call site, equal on all workers.
            call: Function of a tensor, which waits for the other workers.
            vector: Its argument.
            member: Index of the replica that calls.
        """
        # Control dependencies serialise one variable: use one per site and replica, so
        # that neither sites nor local replicas wait for each other.
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
        """Counts an eager call that waits for the other workers."""
        counter = self._counter(site, 0)
        counter.assign_add(1)
        try:
            yield
        finally:
            counter.assign_add(_LEFT)

    def leave(self) -> None:
        """Marks all entered calls as left, after an error has ended their graph."""
        with self._lock:
            for counter in self._counters.values():
                entered = int(counter.numpy()) % _LEFT
                counter.assign(entered * (_LEFT + 1))

    def calls(self) -> dict[str, Calls]:
        """Returns the calls so far of all replicas of this process, by site."""
        with self._lock:
            counters = dict(self._counters)
        totals: dict[str, int] = {}
        for (site, _), counter in counters.items():
            totals[site] = totals.get(site, 0) + int(counter.numpy())
        return {site: Calls(n % _LEFT, n // _LEFT) for site, n in totals.items()}

    def _counter(self, *key):
        with self._lock:
            if key not in self._counters:
                self._counters[key] = local_zeros([], tf.int64)
            return self._counters[key]


SITES = CallSites()
"""The counters of this process."""
