"""A watch over the other processes: no worker waits for another one in silence.

A thread of each process looks every now and then whether a collective that was entered
has not been left. After `TFGRADCOMP_STALL_WARNING` seconds (60) without any progress it
asks the other processes, by a TCP connection of its own, how far they are, and says in
one line who has not arrived and where that process is. After
`TFGRADCOMP_STALL_TIMEOUT` seconds (never, if not set) it ends this process, so that
whoever started it can start it again.
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

from tfgradcomp.collectives.call_sites import SITES, Calls
from tfgradcomp.core.logging import logger

WARNING, TIMEOUT = "TFGRADCOMP_STALL_WARNING", "TFGRADCOMP_STALL_TIMEOUT"
EXIT_CODE = 75
"""Exit code of a process that has waited too long: that of a temporary failure."""
_ANSWER_SECONDS = 2.0
_LEADER_SECONDS = 5.0
# The files of what runs the program, by how their paths begin.
_FOLDERS = (
    Path(tf.__file__).parent,
    Path(keras.__file__).parent,
    Path(__file__).parents[1],
)
_LIBRARIES = (*(f"{folder}{os.sep}" for folder in _FOLDERS), threading.__file__)


class Limits(NamedTuple):
    """Seconds without progress until something happens.

    Attributes:
        warning: Until a line says who is waited for.
        timeout: Until the process ends; infinity for never.
    """

    warning: float
    timeout: float

    @classmethod
    def of_environment(cls) -> Limits:
        """Returns the limits that the environment asks for.

        Raises:
            ValueError: If one is not a number of seconds above 0.
        """
        return cls(_seconds(WARNING, 60.0), _seconds(TIMEOUT, float("inf")))


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
    """Tells other processes how far this one is, and asks them when they are late.

    Args:
        rank: The index of this process.
        limits: When to speak.
    """

    def __init__(self, rank: int, limits: Limits):
        super().__init__(name="tfgradcomp-watch", daemon=True)
        self.rank, self.limits = rank, limits
        self._peers: list[tuple[str, int]] = []
        self._is_over = threading.Event()

    def listen(self, host: str) -> int:
        """Begins to answer questions; returns the port.

        Args:
            host: The address at which other processes know this one.
        """
        try:
            listener = socket.create_server((host, 0))
        except OSError:
            # A name for others only, such as that of a service before its pods.
            listener = socket.create_server(("", 0))
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        return listener.getsockname()[1]

    def begin(self, peers: list[tuple[str, int]]) -> None:
        """Begins to watch.

        Args:
            peers: Hosts and ports of all processes, by ranks.
        """
        self._peers = peers
        # At the end of the interpreter no thread may be inside of TensorFlow.
        atexit.register(self.end)
        self.start()

    def end(self) -> None:
        """Ends the watch, at the end of the process."""
        self._is_over.set()
        self.join(timeout=_ANSWER_SECONDS)
        # Nobody is to wait for one that has raised an error.
        if self.rank == 0 and not hasattr(sys, "last_value"):
            self._outlast_others()

    def _outlast_others(self) -> None:
        """Waits a little until the other processes have ended.

        They ask this one, TensorFlow's leader, for errors all the time, and would log
        one if it ended first.
        """
        deadline = time.monotonic() + _LEADER_SECONDS
        for address in self._peers[1:]:
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
            waits = [site for site, one in calls.items() if one.entered > one.left]
            seconds = time.monotonic() - since
            if not waits or seconds < min(self.limits):
                continue
            if not has_warned:
                has_warned = True
                logger.warning("%s", self._situation(waits[0], calls, seconds))
            if seconds >= self.limits.timeout:
                logger.error(
                    "worker %d ends, because it has waited %.0f s. Received: %s=%g",
                    *(self.rank, seconds, TIMEOUT, self.limits.timeout),
                )
                os._exit(EXIT_CODE)

    def _situation(self, site: str, calls: dict[str, Calls], seconds: float) -> str:
        late = []
        for rank, address in enumerate(self._peers):
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
    """Tells everyone who connects how far this process is."""
    while True:
        link, _ = listener.accept()
        with link, contextlib.suppress(OSError):
            entered = {site: one.entered for site, one in SITES.calls().items()}
            state = {"entered": entered, "place": place_of_main_thread()}
            link.sendall(json.dumps(state).encode())


def _ask(address: tuple[str, int]) -> dict | None:
    """Returns what a process says of itself; None if it does not answer."""
    try:
        with socket.create_connection(address, _ANSWER_SECONDS) as link:
            parts = []
            while part := link.recv(1 << 16):
                parts.append(part)
        return json.loads(b"".join(parts))
    except (OSError, ValueError):
        return None


def place_of_main_thread() -> str:
    """Returns the file, the line and the function of the program that is run now.

    Frames of TensorFlow, of Keras and of this package are passed over.
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
