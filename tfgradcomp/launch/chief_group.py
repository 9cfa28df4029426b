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
    """A chief, its workers and its parameter servers.

    When the chief ends, all are ended. A worker that dies is restarted alone, as often
    as allowed; the chief decides what follows from a loss.
    """

    def __init__(
        self,
        command: list[str],
        grace: float,
        signals: socket.socket,
        max_restarts: int,
    ):
        """Prepares the group.

        Args:
            command: What follows the Python executable.
            grace: Seconds between telling workers to end and killing them.
            signals: Where the numbers of signals to the launcher can be read.
            max_restarts: Number of restarts of single workers.
        """
        super().__init__(command, grace, signals)
        self._restarts_left = max_restarts

    def _handle_ended(self, ended: list[Worker]) -> None:
        for worker in ended:
            if worker.label != CHIEF and worker.exit_code:
                self._handle_lost(worker)
        for worker in ended:
            if worker.label == CHIEF and worker.exit_code:
                self._fail(worker)
            elif worker.label == CHIEF:
                self._stop(signal.SIGTERM)

    def _handle_lost(self, worker: Worker) -> None:
        self.workers.remove(worker)
        restarts = self._restarts_left and worker.label.startswith("worker")
        say(f"{worker}{'; restarting it' if restarts else ''}")
        if restarts:
            self._restarts_left -= 1
            self._start(worker.label, restarted(worker.env))
