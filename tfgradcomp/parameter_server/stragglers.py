"""A watch over workers that answer and do not get on, such as in an endless dataset."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.collectives.stalls import EXIT_CODE, TIMEOUT, Limits
from tfgradcomp.compat import remote
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.remote_worker import RemoteWorker

_ANSWER_SECONDS = 2.0


class Stragglers:
    """Says for whom a training waits, and ends this process after the limit.

    Args:
        workers: The workers that take steps.
    """

    def __init__(self, workers: Sequence[RemoteWorker]):
        self._workers, self._limits = workers, Limits.of_environment()
        self._last: dict = {}
        self._since, self._has_warned = time.monotonic(), False

    @property
    def period(self) -> float:
        """Seconds without a report after which to look, again and again."""
        return min(self._limits) / 4

    def look(self) -> None:
        """Looks how far the workers are."""
        batches = self._batches()
        now = time.monotonic()
        if batches != self._last:
            self._last, self._since, self._has_warned = batches, now, False
        seconds = now - self._since
        if len(batches) < len(self._workers):
            # The heartbeat says who does not answer.
            return
        if seconds >= self._limits.warning and not self._has_warned:
            self._has_warned = True
            late = [d for d, (asked, got) in batches.items() if asked > got]
            logger.warning(
                "no worker has gone on for %.0f s: %s",
                seconds,
                f"{', '.join(late)} waiting for the dataset"
                if late
                else "all have their batches, and compute or wait for servers",
            )
        if seconds >= self._limits.timeout:
            logger.error(
                "the chief ends, because no worker has gone on for %.0f s. "
                "Received: %s=%g",
                *(seconds, TIMEOUT, self._limits.timeout),
            )
            os._exit(EXIT_CODE)

    def _batches(self):
        """Returns the batches that each worker that answers has asked for and got."""
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
