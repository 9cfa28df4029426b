"""Output of the workers, cut into whole lines and shown with a label."""

from __future__ import annotations

import os
import re
import select
from collections import deque
from collections.abc import Iterable
from typing import IO

CHUNK = 1 << 16
"""Bytes that are read at once."""

TAIL_LINES = 20
"""Lines of a worker that are shown again when it has failed."""

# A progress bar returns with \r or \b to draw itself again: each ends a line too.
_LINE_END = re.compile(rb"([\r\n\x08])")

# Written before TensorFlow reads TF_CPP_MIN_LOG_LEVEL, so no setting hides them.
_START_NOTICE = re.compile(
    rb"All log messages before absl::InitializeLog|oneDNN custom operations are on"
)


class LineCutter:
    """Cuts a stream of bytes into whole lines, a redrawn progress bar included."""

    def __init__(self):
        self._rest = b""
        self._redrawn = False  # A line was shown, its newline may follow.

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes, without their ends."""
        lines = []
        *pieces, self._rest = _LINE_END.split(self._rest + data)
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            # The steps of a redraw are blank, and so is the newline that ends one.
            if text.strip() or (end == b"\n" and not self._redrawn):
                lines.append(text)
                self._redrawn = end != b"\n"
            elif end == b"\n":
                self._redrawn = False
        return lines

    def close(self) -> list[bytes]:
        """Returns the rest when the stream ends, as a list of at most one line."""
        return [self._rest] if self._rest else []


class WorkerStream:
    """The stdout or stderr of a worker, as lines.

    Attributes:
        pipe: Where the worker's bytes arrive.
        target: File descriptor of the launcher that they belong to, 1 or 2.
        label: The worker's label.
        is_open: True while more may come.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        target: int,
        label: str,
        tail: deque[bytes],
        hides_notices: bool,
    ):
        """Prepares the pipe for reading without waiting.

        Args:
            pipe: Where the worker's bytes arrive.
            target: File descriptor of the launcher that they belong to.
            label: The worker's label.
            tail: Gets every line.
            hides_notices: True: TensorFlow's notices at its start are dropped.
        """
        os.set_blocking(pipe.fileno(), False)
        self.pipe, self.target, self.label = pipe, target, label
        self.is_open = True
        self._tail, self._hides_notices = tail, hides_notices
        self._cutter = LineCutter()

    def read(self) -> list[bytes]:
        """Returns the lines that have become complete; closes the pipe at its end.

        Raises:
            BlockingIOError: If nothing has come.
        """
        data = os.read(self.pipe.fileno(), CHUNK)
        lines = self._cutter.feed(data) if data else self._cutter.close()
        if self._hides_notices:
            lines = [line for line in lines if not _START_NOTICE.search(line)]
        self._tail.extend(lines)
        self.is_open = bool(data)
        return lines


def show(target: int, label: str, lines: Iterable[bytes]) -> OSError | None:
    """Writes lines with a label; returns the error if that was not possible."""
    prefix = label.encode()
    return _write(target, b"".join(b"[%s] %s\n" % (prefix, line) for line in lines))


def say(text: str) -> None:
    """Writes a message of the launcher itself to stderr."""
    _write(2, f"tfgradcomp.launch: {text}\n".encode())


def _write(target: int, data: bytes) -> OSError | None:
    """Writes all of `data`, unbuffered; returns the error if that was not possible."""
    try:
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                # Whoever reads is slow, and shares the pipe without waiting.
                select.select([], [target], [])
    except OSError as error:
        return error
    return None
