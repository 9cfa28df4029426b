"""Detection of workers that answer but make no progress, such as by a slow dataset."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.collectives.stalls import Limits
from tfgradcomp.compat import remote
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.remote_worker import RemoteWorker

_ANSWER_SECONDS = 2.0


class Stragglers:
    """Logs which workers delay a training, and ends this process after a limit."""

    def __init__(self, workers: Sequence[RemoteWorker]):
        self._workers, self._limits = workers, Limits.of_environment()
        self._last: dict = {}
        self._since, self._has_warned = time.monotonic(), False

    @property
    def period(self) -> float:
        """Seconds between two calls of `look` while no worker reports."""
        return min(self._limits) / 4

    def look(self) -> None:
        """Compares the workers' batches with those of the last call."""
        batches = self._batches()
        now = time.monotonic()
        if batches != self._last:
            self._last, self._since, self._has_warned = batches, now, False
        seconds = now - self._since
        if len(batches) < len(self._workers):
            # The heartbeat logs tasks that do not answer.
            return
        if seconds >= self._limits.warning and not self._has_warned:
            self._has_warned = True
            late = [d for d, (asked, got) in batches.items() if asked > got]
            logger.warning(
                "no worker has made progress for %.0f s: %s",
                seconds,
                f"{', '.join(late)} waiting for the dataset"
                if late
                else "all have their batches, and compute or wait for servers",
            )
        reason = "the chief ends, because no worker has made progress for %.0f s."
        self._limits.end_if_late(seconds, reason, seconds)

    def _batches(self):
        """Returns `RemoteWorker.batches` by device, of the workers that answer."""
        found: dict = {}

        def read(worker):
            with contextlib.suppress(tf.errors.OpError), remote.own_executor():
                found[worker] = worker.batches()

        threads = [
            threading.Thread(target=read, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_ANSWER_SECONDS)
        workers = [worker for worker in self._workers if worker in found]
        return {worker.device: found[worker] for worker in workers}
