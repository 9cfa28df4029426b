"""Processes that end with the benchmark that started them, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL = 1


def exit_on_signals() -> None:
    """Makes the first signal an exception, so that everything is cleaned up.

    Later signals are ignored: the cleaning is short.
    """

    def leave(number, frame):
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in _SIGNALS:
        signal.signal(each, leave)


class Processes:
    """Started processes, ended together when the block ends.

    Their output goes to files, which `wait` shows of those that fail.

    Args:
        folder: Where the output goes.

    Example:
        ```python
        with Processes(folder) as processes:
            processes.start([sys.executable, "worker.py"])
            processes.wait(timeout=60)
        ```
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._running: list[tuple[subprocess.Popen, Path]] = []

    def __enter__(self):
        return self

    def start(self, command: list[str], env: dict[str, str] | None = None):
        """Starts a process in a session of its own."""
        log = self.folder / f"output-{len(self._running)}.txt"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # One that is killed hard cleans up nothing; the kernel does.
                preexec_fn=_die_with_parent,
            )
        self._running.append((process, log))

    def wait(self, timeout: float) -> None:
        """Waits until all have ended with exit code 0.

        Args:
            timeout: Seconds.

        Raises:
            RuntimeError: As soon as one has failed, or when the time is over; with
                the last lines of its output.
        """
        deadline = time.monotonic() + timeout
        while True:
            codes = [process.poll() for process, _ in self._running]
            for code, (_, log) in zip(codes, self._running, strict=True):
                if code:
                    # The others are told by their peer's end, and end by our exit.
                    raise RuntimeError(f"exit code {code}; the output:\n{_tail(log)}")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                index = codes.index(None)
                raise RuntimeError(
                    f"not ready after {timeout} s; give more with --timeout, or less "
                    f"work. The output:\n{_tail(self._running[index][1])}"
                )
            time.sleep(0.05)

    def __exit__(self, *_):
        # A launcher that is told to stop gives its workers five seconds.
        for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            for process, _ in self._running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            deadline = time.monotonic() + patience
            for process, _ in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))


def idle_seconds() -> float:
    """Returns the seconds, in hundredths, that a core has been idle; mean of all cores.

    A core that works for the kernel, for packets too, is not idle. The processor time
    of a process does not contain this work.
    """
    with open("/proc/stat") as file:
        idle, waits = map(int, file.readline().split()[4:6])
    return (idle + waits) / os.sysconf("SC_CLK_TCK") / os.cpu_count()


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds that a call takes, and how many a core is idle in them."""
    began, before = time.perf_counter(), idle_seconds()
    call()
    return time.perf_counter() - began, idle_seconds() - before


def _die_with_parent():
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
