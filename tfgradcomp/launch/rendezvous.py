"""Agreement of the launchers of several hosts on the attempt that they start.

The launcher of worker 0 leads: it listens at the address of worker 0 until that worker
starts. Each other launcher connects to it, retrying until it succeeds, and sends the
number of its next attempt. When all have sent theirs, the leader answers with the
highest number, and all launchers start that attempt.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import time
from collections.abc import Sequence

from tfgradcomp.addresses import listen_everywhere, split_address
from tfgradcomp.launch.output import CHUNK, say

# Seconds between two tries to reach the leader; they double from the first to the last.
_BACK_OFF = (0.1, 2.0)
_NOTICE_SECONDS = 60.0
# After a failure the other launchers are back soon, or not at all.
_PATIENCE_SECONDS = 600.0


class LauncherRendezvous:
    """A meeting of the launchers of a cluster before each attempt.

    Args:
        cluster: The address of each worker, `"HOST:PORT"`.
        index: Index of this launcher's worker.
        signals: Socket with the numbers of signals that the launcher receives.
        leader: Address by which this host reaches worker 0, if it is another one.
    """

    def __init__(
        self,
        cluster: Sequence[str],
        index: int,
        signals: socket.socket,
        leader: str | None = None,
    ):
        self._cluster, self._index, self._signals = cluster, index, signals
        host, port = split_address(leader or cluster[0])
        self._leader = host, int(port)
        self._missing = {0} if index else set(range(1, len(cluster)))
        self._began = self._last_notice = 0.0
        self._is_first = True

    def agree(self, attempt: int) -> int:
        """Waits for all launchers; returns the attempt that all of them start.

        Args:
            attempt: The next attempt of this launcher, from 0.

        Raises:
            SystemExit: If a signal tells the launcher to end, or if other launchers are
                missing for ten minutes after a failure.
        """
        self._began = self._last_notice = time.monotonic()
        self._is_first = attempt == 0
        meet = self._follow if self._index else self._lead
        return meet(attempt)

    def _lead(self, attempt):
        others = {*range(1, len(self._cluster))}
        # Index and attempt of each launcher that has sent both, by its connection.
        known: dict[socket.socket, tuple[int, int]] = {}
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(listen_everywhere(self._leader[1]))
            unknown: dict[socket.socket, bytes] = {}
            while missing := others - {index for index, _ in known.values()}:
                self._missing = missing
                for ready in self._wait([server, *unknown, *known], 1.0):
                    if ready is server:
                        link = stack.enter_context(server.accept()[0])
                        unknown[link] = b""
                    elif ready in known:
                        # A launcher sends nothing more: this one has ended.
                        del known[ready]
                    else:
                        part = _receive(ready)
                        text = unknown.pop(ready) + part
                        answer = _parse(text)
                        if answer and answer.get("index") in others:
                            known[ready] = answer["index"], answer["attempt"]
                        elif part and b"\n" not in text and len(text) < CHUNK:
                            unknown[ready] = text
            agreed = max([attempt, *(other for _, other in known.values())])
            for link in known:
                with contextlib.suppress(OSError):
                    link.sendall(_line(attempt=agreed))
        return agreed

    def _follow(self, attempt):
        pause, longest = _BACK_OFF
        while True:
            with contextlib.suppress(OSError):
                with socket.create_connection(self._leader, timeout=5) as link:
                    link.sendall(_line(index=self._index, attempt=attempt))
                    text = b""
                    while not text.endswith(b"\n"):
                        if self._wait([link], 1.0):
                            part = _receive(link)
                            if not part:
                                break
                            text += part
                    if answer := _parse(text):
                        return answer["attempt"]
            # The leader does not listen yet, or a worker of a failed attempt answered.
            self._wait([], pause)
            pause = min(2 * pause, longest)

    def _wait(self, links, seconds):
        """Returns the links that can be read, after at most some seconds."""
        ready, *_ = select.select([self._signals, *links], [], [], seconds)
        if self._signals in ready:
            ready.remove(self._signals)
            for signum in self._signals.recv(CHUNK):
                if signum != signal.SIGCHLD:
                    say(f"{signal.Signals(signum).name} before the workers started")
                    raise SystemExit(128 + signum)
        now = time.monotonic()
        names = ", ".join(f"{i} ({self._cluster[i]})" for i in sorted(self._missing))
        if now - self._last_notice >= _NOTICE_SECONDS:
            self._last_notice = now
            say(f"waiting for the launchers of workers {names}")
        if not self._is_first and now - self._began >= _PATIENCE_SECONDS:
            say(
                f"the launchers of workers {names} have not come back. Start the run "
                f"again on every host. Received: {_PATIENCE_SECONDS:g} s of waiting"
            )
            raise SystemExit(1)
        return ready


def _line(**values: int) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _receive(link: socket.socket) -> bytes:
    """Returns the bytes that have arrived; empty at the end of the connection."""
    try:
        return link.recv(CHUNK)
    except OSError:
        return b""


def _parse(text: bytes) -> dict | None:
    """Returns a launcher's message; None if it is incomplete or of no launcher."""
    try:
        values = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    # The leader's has no index.
    numbers = values.get("attempt"), values.get("index", 0)
    return values if all(isinstance(number, int) for number in numbers) else None
