"""Workers that run and end together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from typing import IO, cast

from tfgradcomp.launch.output import CHUNK, WorkerStream, say, show
from tfgradcomp.launch.worker import Worker


class WorkerGroup:
    """The workers of one attempt, watched by one loop without threads.

    If a worker fails, all workers are ended.

    Args:
        command: Arguments of each process after the Python executable.
        grace: Seconds between the signal to end and SIGKILL.
        signals: Socket with the numbers of signals that the launcher receives.

    Attributes:
        workers: The workers.
        received_signal: The first signal that told the launcher to end; 0 if none did.
    """

    def __init__(self, command: list[str], grace: float, signals: socket.socket):
        self.workers: list[Worker] = []
        self.received_signal = 0
        self._command, self._grace, self._signals = command, grace, signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._hides_notices = "TF_CPP_MIN_LOG_LEVEL" not in os.environ
        self._culprit: Worker | None = None
        self._is_stopping = False
        self._lost_outputs: set[int] = set()
        self._deadline: float | None = None

    def run(self, envs: dict[str, dict[str, str]]) -> int:
        """Starts the workers, waits for all of them and returns the exit code.

        Args:
            envs: The environment of each worker by its label.
        """
        try:
            for label, env in envs.items():
                self._start(label, env)
            self._watch()
        finally:
            for worker in self.workers:
                if not worker.has_ended():
                    worker.kill()
            self._drain()
        if self._culprit:
            say(f"{self._culprit}; its last lines:")
            show(2, self._culprit.label, self._culprit.tail)
            return self._culprit.exit_code
        if not self.received_signal:
            return 0
        # Workers that save at a signal all end by themselves with one code.
        codes = {worker.process.returncode for worker in self.workers}
        common = codes.pop() if len(codes) == 1 else 0
        return common if common > 0 else 128 + self.received_signal

    def _start(self, label: str, env: dict[str, str]) -> None:
        worker = Worker(label, self._command, env)
        self.workers.append(worker)
        pipes = worker.process.stdout, worker.process.stderr
        for target, pipe in enumerate(cast(tuple[IO[bytes], ...], pipes), 1):
            stream = WorkerStream(pipe, target, label, worker.tail, self._hides_notices)
            self._selector.register(pipe, selectors.EVENT_READ, stream)

    def _watch(self) -> None:
        while True:
            ended = [worker for worker in self.workers if worker.has_ended()]
            if not self._is_stopping:
                self._handle_ended(ended)
            if not any(worker.is_running for worker in self.workers):
                return
            if self._deadline and time.monotonic() >= self._deadline:
                self._deadline = None
                self._send(signal.SIGKILL)
            wait = self._deadline and max(0, self._deadline - time.monotonic())
            # Wakes up as soon as a worker dies, because SIGCHLD is among the signals.
            for key, _ in self._selector.select(wait):
                self._read(key.data) if key.data else self._handle_signals()

    def _handle_ended(self, ended: list[Worker]) -> None:
        """Ends all workers if some of those that have ended failed."""
        failed = [worker for worker in ended if worker.exit_code]
        if failed:
            # If several failed, a worker that a signal ended is the cause: when its
            # death breaks a collective, its peers raise errors rather than crash.
            self._fail(min(failed, key=lambda w: w.process.returncode > 0))

    def _fail(self, culprit: Worker) -> None:
        """Ends all workers; the culprit's exit code becomes that of the run."""
        self._culprit = culprit
        say(f"{culprit}; ending the others")
        self._stop(signal.SIGTERM)

    def _handle_signals(self) -> None:
        for signum in self._signals.recv(CHUNK):
            if signum == signal.SIGCHLD:
                continue
            name = signal.Signals(signum).name
            if signum == signal.SIGINT and self.received_signal:
                say(f"{name} again: killing the workers")
                self._send(signal.SIGKILL)
                continue
            self.received_signal = self.received_signal or signum
            say(f"{name}: passed on to the workers, killing them in {self._grace:g} s")
            self._stop(signum)

    def _stop(self, signum: int) -> None:
        self._send(signum)
        if not self._is_stopping:
            self._is_stopping = True
            self._deadline = time.monotonic() + self._grace

    def _send(self, signum: int) -> None:
        for worker in self.workers:
            if worker.is_running:
                worker.send(signum)

    def _read(self, stream: WorkerStream) -> None:
        """Shows the new lines of a stream."""
        error = show(stream.target, stream.label, stream.read())
        if error and stream.target not in self._lost_outputs:
            # A full disk or a closed reader (`| head`) is no reason to end the run.
            name = {1: "stdout", 2: "stderr"}[stream.target]
            say(f"{name} cannot be written ({error.strerror}); lines may be lost")
            self._lost_outputs.add(stream.target)
        if not stream.is_open:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()

    def _drain(self) -> None:
        """Shows the lines that the workers wrote before they ended."""
        for key in list(self._selector.get_map().values()):
            # A process that left the worker's session may still hold the pipe.
            with contextlib.suppress(BlockingIOError):
                while key.data and key.data.is_open:
                    self._read(key.data)
        self._selector.close()
