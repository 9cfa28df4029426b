"""Workers and parameter servers that serve a chief."""

from __future__ import annotations

import signal
import socket

from tfgradcomp.launch.environment import restarted
from tfgradcomp.launch.output import say
from tfgradcomp.launch.worker import Worker
from tfgradcomp.launch.worker_group import WorkerGroup

CHIEF = "chief"
"""The label of the chief."""


class ChiefGroup(WorkerGroup):
    """A chief with its workers and parameter servers.

    The group ends when the chief ends. A worker that dies is restarted alone, up to
    `max_restarts` times in total; the chief decides how to continue after a loss.

    Args:
        command: Arguments of each process after the Python executable.
        grace: Seconds between the signal to end and SIGKILL.
        signals: Socket with the numbers of signals that the launcher receives.
        max_restarts: Number of restarts of single workers.
    """

    def __init__(
        self,
        command: list[str],
        grace: float,
        signals: socket.socket,
        max_restarts: int,
    ):
        super().__init__(command, grace, signals)
        self._restarts_left = max_restarts

    def _handle_ended(self, ended: list[Worker]) -> None:
        for worker in ended:
            if worker.label != CHIEF and worker.exit_code:
                self._handle_lost(worker)
        for chief in (worker for worker in ended if worker.label == CHIEF):
            if chief.exit_code:
                self._fail(chief)
            else:
                self._stop(signal.SIGTERM)

    def _handle_lost(self, worker: Worker) -> None:
        self.workers.remove(worker)
        restarts = self._restarts_left and worker.label.startswith("worker")
        say(f"{worker}{'; restarting it' if restarts else ''}")
        if restarts:
            self._restarts_left -= 1
            self._start(worker.label, restarted(worker.env))
