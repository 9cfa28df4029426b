"""A watchdog that names the process for which a collective waits.

A thread of each process checks regularly for collectives that were entered and not
left. After `TFGRADCOMP_STALL_WARNING` seconds (60) without progress, it asks the other
processes over TCP which collectives they have entered, and logs in one line which
process is missing and which line of the program it executes. After
`TFGRADCOMP_STALL_TIMEOUT` seconds (unset: never) it ends this process, so that a
launcher can restart it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.addresses import listen_at
from tfgradcomp.collectives.call_sites import SITES, Calls
from tfgradcomp.core.logging import logger

WARNING, TIMEOUT = "TFGRADCOMP_STALL_WARNING", "TFGRADCOMP_STALL_TIMEOUT"
WATCH_PORT = "TFGRADCOMP_WATCH_PORT"
EXIT_CODE = 75
"""Exit code of a process that has waited too long: EX_TEMPFAIL, a temporary failure."""
_ANSWER_SECONDS = 2.0
# A process may wait for a minute until TensorFlow has removed its last iterator.
_LEADER_SECONDS = 65.0
# Path prefixes of files that are not part of the user's program.
_FOLDERS = (
    Path(tf.__file__).parent,
    Path(keras.__file__).parent,
    Path(__file__).parents[1],
)
_LIBRARIES = (*(f"{folder}{os.sep}" for folder in _FOLDERS), threading.__file__)


class Limits(NamedTuple):
    """Seconds without progress until the program reacts.

    Attributes:
        warning: Until a log line names the missing process.
        timeout: Until this process ends; infinity for never.
    """

    warning: float
    timeout: float

    @classmethod
    def of_environment(cls) -> Limits:
        """Returns the limits from the environment.

        Raises:
            ValueError: If a limit is not a number of seconds above 0.
        """
        return cls(_seconds(WARNING, 60.0), _seconds(TIMEOUT, float("inf")))

    def end_if_late(self, seconds: float, reason: str, *values: object) -> None:
        """Ends this process after the timeout; logs `reason`, formatted with values."""
        if seconds >= self.timeout:
            text = f"{reason} Received: %s=%g"
            logger.error(text, *values, TIMEOUT, self.timeout)
            os._exit(EXIT_CODE)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"{name} must be a number of seconds above 0. Received: {name}={text!r}"
        )
    return seconds


class StallWatchdog(threading.Thread):
    """Reports this process' collectives to other processes, and asks for theirs.

    Attributes:
        peers: Hosts and ports of all processes, by rank; empty before they are known.
    """

    def __init__(self, rank: int, limits: Limits):
        super().__init__(name="tfgradcomp-watch", daemon=True)
        self.rank, self.limits = rank, limits
        self.peers: list[tuple[str, int]] = []
        self._is_over = threading.Event()

    def listen(self, host: str) -> int:
        """Starts to answer processes that connect to `host`; returns the port.

        Raises:
            ValueError: If the environment names a port that is none.
        """
        port = os.environ.get(WATCH_PORT, "0")
        if not (port.isdecimal() and int(port) < 2**16):
            raise ValueError(
                f"{WATCH_PORT} must be a port, or 0 for any. Received: "
                f"{WATCH_PORT}={port!r}"
            )
        try:
            listener = listen_at(host, int(port))
        except OSError:
            # Another strategy of this process has the port.
            listener = listen_at(host, 0)
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        return listener.getsockname()[1]

    def begin(self) -> None:
        """Starts the watchdog."""
        # When the interpreter exits, no thread may execute TensorFlow code.
        atexit.register(self.end)
        self.start()

    def end(self) -> None:
        """Stops the watchdog when the process ends."""
        self._is_over.set()
        self.join(timeout=_ANSWER_SECONDS)
        # A process that has raised an error must end at once.
        if self.rank == 0 and not hasattr(sys, "last_value"):
            self._outlast_others()

    def _outlast_others(self) -> None:
        """Waits, with a limit, until the other processes have ended.

        They poll this process, TensorFlow's leader, for errors, and would log an error
        if it ended first.
        """
        deadline = time.monotonic() + _LEADER_SECONDS
        for address in self.peers[1:]:
            while time.monotonic() < deadline and _ask(address) is not None:
                time.sleep(0.02)

    @override
    def run(self):
        last, since, has_warned = None, time.monotonic(), False
        while not self._is_over.wait(min(1.0, self.limits.warning / 4)):
            calls = SITES.calls()
            if calls != last:
                last, since, has_warned = calls, time.monotonic(), False
                continue
            waits = [
                site for site, count in calls.items() if count.entered > count.left
            ]
            seconds = time.monotonic() - since
            if not waits or seconds < min(self.limits):
                continue
            if not has_warned:
                has_warned = True
                logger.warning("%s", self._situation(waits[0], calls, seconds))
            reason = "worker %d ends, because it has waited %.0f s."
            self.limits.end_if_late(seconds, reason, self.rank, seconds)

    def _situation(self, site: str, calls: dict[str, Calls], seconds: float) -> str:
        late = []
        if not self.peers:
            late.append(
                "the others have not created a compressed optimizer. They are late, or "
                "their script differs, as with a plain Keras optimizer"
            )
        for rank, address in enumerate(self.peers):
            if rank == self.rank:
                continue
            answer = _ask(address)
            if answer is None:
                late.append(f"worker {rank} does not answer (stopped or out of reach)")
            elif answer["entered"].get(site, 0) < calls[site].entered:
                late.append(
                    f"worker {rank} has not arrived, it is at {answer['place']}"
                )
        return f"worker {self.rank} has waited {seconds:.0f} s in the {site}: " + (
            "; ".join(late) or "all have arrived"
        )


def _answer(listener: socket.socket) -> None:
    """Sends this process' collectives and place to each process that connects."""
    while True:
        with contextlib.suppress(OSError), listener.accept()[0] as link:
            link.settimeout(_ANSWER_SECONDS)
            entered = {site: n.entered for site, n in SITES.calls().items()}
            state = {"entered": entered, "place": place_of_main_thread()}
            link.sendall(json.dumps(state).encode())


def _ask(address: tuple[str, int]) -> dict | None:
    """Returns the answer of a process; None if it does not answer."""
    try:
        with socket.create_connection(address, _ANSWER_SECONDS) as link:
            parts = []
            while part := link.recv(1 << 16):
                parts.append(part)
        answer = json.loads(b"".join(parts))
    except (OSError, ValueError):
        return None
    # Another program may have the port by now.
    is_worker = isinstance(answer, dict) and {"entered", "place"} <= answer.keys()
    return answer if is_worker else None


def place_of_main_thread() -> str:
    """Returns the file, line and function of the program that is executing.

    Frames of TensorFlow, Keras and this package are skipped.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            break
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    name = Path(frame.f_code.co_filename).name
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
