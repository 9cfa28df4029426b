"""Collectives between N threads of one process, for tests and studies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import Collectives


class Loopback:
    """N threads that exchange tensors, each of them a worker that runs eagerly.

    Example:
        ```python
        def worker(rank, collectives):
            return collectives.sum(tf.constant([float(rank)]), "example")

        Loopback(3).run(worker)  # three times [3.0]
        ```

    Args:
        num_workers: N.
        timeout: Seconds that a worker waits for the others before it fails.
    """

    def __init__(self, num_workers: int, timeout: float = 120.0):
        self.num_workers = num_workers
        self._slots: list = [None] * num_workers
        self._barrier = threading.Barrier(num_workers, timeout=timeout)

    def meet(self, rank: int, item: Any) -> list:
        """Exchanges `item`; returns all workers' items, in the order of ranks."""
        self._slots[rank] = item
        self._barrier.wait()
        items = list(self._slots)
        # No worker may store its next item before all workers have read this one.
        self._barrier.wait()
        return items

    def collectives(self, rank: int) -> LoopbackCollectives:
        """Returns the collectives of the worker with a rank."""
        return LoopbackCollectives(self, rank)

    def run(self, worker: Callable) -> list:
        """Runs `worker(rank, collectives)` in N threads; returns their results.

        Raises:
            Exception: The error of the first worker that failed.
        """
        results: list = [None] * self.num_workers
        errors: list[BaseException] = []

        def body(rank):
            try:
                results[rank] = worker(rank, self.collectives(rank))
            except threading.BrokenBarrierError as error:
                errors.append(error)
            except BaseException as error:
                errors.insert(0, error)
                self._barrier.abort()

        threads = [
            threading.Thread(target=body, args=(rank,))
            for rank in range(self.num_workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self._barrier.reset()
            raise errors[0]
        return results


class LoopbackCollectives(Collectives):
    """One worker's view of a `Loopback`."""

    def __init__(self, loopback: Loopback, rank: int):
        self.num_workers = loopback.num_workers
        self.process_index, self.num_processes = rank, loopback.num_workers
        self._loopback = loopback

    @property
    @override
    def rank(self):
        return self.process_index

    @override
    def gather(self, vector, call_site):
        return tf.stack(self._meet(vector, call_site))

    @override
    def all_to_all(self, rows, call_site):
        return tf.stack([other[self.rank] for other in self._meet(rows, call_site)])

    @override
    def sum(self, vector, call_site):
        return tf.add_n(self._meet(vector, call_site))

    @override
    def max(self, vector, call_site):
        return tf.reduce_max(self.gather(vector, call_site), axis=0)

    def _meet(self, vector, call_site):
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Workers of a loopback exchange tensors in Python, so their steps must "
                f"run eagerly, not in a tf.function. Received: {call_site=}"
            )
        items = self._loopback.meet(self.process_index, (call_site, vector))
        if len({site for site, _ in items}) > 1:
            raise RuntimeError(
                "Workers of a loopback are at different call sites. All workers must "
                "call the same collectives in the same order. "
                f"Received: call_sites={[site for site, _ in items]}"
            )
        return [item for _, item in items]
