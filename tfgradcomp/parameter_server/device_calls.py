"""Calls that run for tasks of a cluster at once, each in a thread of its own.

Threads are used again: TensorFlow keeps something of every thread that has called it,
half a kilobyte, which would add up over many rounds.
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

# Seconds without a report, after an error, after which training ends.
END_SECONDS = 60.0


# Where the threads wait that have nothing to do.
_idle: queue.SimpleQueue = queue.SimpleQueue()


class Report(NamedTuple):
    """A report of a call.

    Attributes:
        device: The device that the call is for.
        value: What the call returned, the error that it ended in, or its progress.
        has_ended: Whether the call has ended.
    """

    device: str
    value: Any
    has_ended: bool = True

    @property
    def is_error(self) -> bool:
        """True if the call ended in an error."""
        return isinstance(self.value, Exception)


class DeviceCalls:
    """Calls that were started for devices, and their reports.

    Attributes:
        running: The devices of the calls that have not ended, one for each call.
    """

    def __init__(self, cluster: Cluster, stragglers: Stragglers):
        self._cluster, self._stragglers = cluster, stragglers
        self._reports: queue.SimpleQueue = queue.SimpleQueue()
        self.running: list = []

    def start(self, device: str, call: Callable) -> None:
        """Starts a call for a device, in a thread of its own."""
        self.running.append(device)
        _start_in_thread(lambda: self._run(device, call))

    def report_progress(self, device: str, value) -> None:
        """Reports the progress of a call that goes on, from its thread."""
        self._reports.put(Report(device, value, has_ended=False))

    def next(self, errors: dict[str, Exception]) -> Report:
        """Returns the next report.

        Args:
            errors: The errors so far, by devices. After one of them nobody is waited
                for without end.

        Raises:
            ConnectionError: If a parameter server is gone.
            RuntimeError: If calls do not end after an error.
        """
        report = self._wait(errors)
        if report.has_ended and report.device in self.running:
            self.running.remove(report.device)
        return report

    def _run(self, device, call):
        try:
            with remote.own_executor(), tf.device(device):
                value = call()
        except Exception as error:
            value = error
        self._reports.put(Report(device, value))

    def _wait(self, errors):
        # A call of a task that is silent ends by the `Heartbeat`.
        while True:
            seconds = END_SECONDS if errors else self._stragglers.period
            with contextlib.suppress(queue.Empty):
                return self._reports.get(timeout=seconds)
            if not errors:
                self._stragglers.look()
                continue
            self._cluster.check_servers()
            raise RuntimeError(
                f"After an error, others did not end within {END_SECONDS:g} s. "
                f"Received: {errors}"
            )


def _start_in_thread(call):
    try:
        inbox = _idle.get_nowait()
    except queue.Empty:
        inbox = queue.SimpleQueue()
        # A call of a task that does not answer keeps no process from ending.
        threading.Thread(target=_work, args=(inbox,), daemon=True).start()
    inbox.put(call)


def _work(inbox):
    while True:
        inbox.get()()
        _idle.put(inbox)
