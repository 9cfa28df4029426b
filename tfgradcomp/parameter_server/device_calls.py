"""Concurrent calls for tasks of a cluster, each in a separate thread.

Threads are reused, because TensorFlow keeps half a kilobyte for every thread that has
called it, which would add up over many rounds.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfgradcomp.compat import remote
from tfgradcomp.parameter_server.cluster import Cluster
from tfgradcomp.parameter_server.stragglers import Stragglers

# Seconds that training waits for the next report after an error.
END_SECONDS = 60.0

# The inboxes of threads that wait for a call.
_idle: queue.SimpleQueue = queue.SimpleQueue()


class Report(NamedTuple):
    """The report of a call for a device: its result, its error, or its progress."""

    device: str
    value: Any
    has_ended: bool = True

    @property
    def is_error(self) -> bool:
        """True if the call ended in an error."""
        return isinstance(self.value, Exception)


class DeviceCalls:
    """Calls that were started for devices, and their reports.

    `running` has the device of each running call.
    """

    def __init__(self, cluster: Cluster, stragglers: Stragglers):
        self._cluster, self._stragglers = cluster, stragglers
        self._reports: queue.SimpleQueue = queue.SimpleQueue()
        self.running: list = []

    def start(self, device: str, call: Callable, *arguments: Any) -> None:
        """Starts `call(*arguments)` for a device in a separate thread."""
        self.running.append(device)
        _start_in_thread(lambda: self._run(device, call, arguments))

    def report_progress(self, device: str, value) -> None:
        """Reports the progress of a running call, from its thread."""
        self._reports.put(Report(device, value, has_ended=False))

    def next(self, errors: dict[str, Exception]) -> Report:
        """Returns the next report; after an error, the wait for it is limited.

        If none comes in time, raises a ConnectionError where a server is gone, or else
        a RuntimeError.
        """
        report = self._wait(errors)
        if report.has_ended and report.device in self.running:
            self.running.remove(report.device)
        return report

    def _run(self, device, call, arguments):
        try:
            with remote.own_executor(), tf.device(device):
                value = call(*arguments)
        except Exception as error:
            value = error
        self._reports.put(Report(device, value))

    def _wait(self, errors):
        # The `Heartbeat` ends calls of tasks that do not answer.
        while True:
            seconds = END_SECONDS if errors else self._stragglers.period
            with contextlib.suppress(queue.Empty):
                return self._reports.get(timeout=seconds)
            if not errors:
                self._stragglers.look()
                continue
            self._cluster.check_servers()
            raise RuntimeError(
                f"After an error, other calls did not end within {END_SECONDS:g} s. "
                f"Restart all tasks. Received: errors={errors}"
            )


def _start_in_thread(call):
    try:
        inbox = _idle.get_nowait()
    except queue.Empty:
        inbox = queue.SimpleQueue()
        # A daemon, so that a task that does not answer does not delay the exit.
        threading.Thread(target=_work, args=(inbox,), daemon=True).start()
    inbox.put(call)


def _work(inbox):
    while True:
        inbox.get()()
        _idle.put(inbox)
