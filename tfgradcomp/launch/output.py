"""Output of the workers, cut into whole lines and shown with a label."""

from __future__ import annotations

import os
import re
import select
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO

CHUNK = 1 << 16
"""Largest number of bytes of one read."""

LONGEST_LINE = 1 << 20
"""Number of bytes after which a line without an end is cut."""

TAIL_LINES = 20
"""Number of a failed worker's last lines that are shown again."""

# A progress bar returns with \r or \b to redraw itself: each ends a line too.
_LINE_END = re.compile(rb"([\r\n\x08])")

# Written before TensorFlow reads TF_CPP_MIN_LOG_LEVEL, so no setting hides them.
_START_NOTICE = re.compile(
    rb"All log messages before absl::InitializeLog|oneDNN custom operations are on"
)


class LineCutter:
    """Cuts a stream of bytes into whole lines, a redrawn progress bar included."""

    def __init__(self):
        self._rest = b""
        self._redrawn = False  # A line was shown; its newline may follow.

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes, without their ends."""
        lines = []
        *pieces, self._rest = _LINE_END.split(self._rest + data)
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            # The steps of a redraw are blank, and so is the newline after it.
            if text.strip() or (end == b"\n" and not self._redrawn):
                lines.append(text)
                self._redrawn = end != b"\n"
            elif end == b"\n":
                self._redrawn = False
        if len(self._rest) >= LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def close(self) -> list[bytes]:
        """Returns the unfinished line at the end of the stream, if there is one."""
        return [self._rest] if self._rest else []


@dataclass
class WorkerStream:
    """The stdout or stderr of a worker, read line by line without blocking.

    Attributes:
        pipe: The worker's end of the stream.
        target: File descriptor of the launcher for the output, 1 or 2.
        label: The worker's label.
        tail: Receives every line.
        hides_notices: True: TensorFlow's notices at its start are dropped.
        is_open: True until the pipe has ended.
    """

    pipe: IO[bytes]
    target: int
    label: str
    tail: deque[bytes]
    hides_notices: bool
    is_open: bool = True
    _cutter: LineCutter = field(default_factory=LineCutter)

    def __post_init__(self):
        os.set_blocking(self.pipe.fileno(), False)

    def read(self) -> list[bytes]:
        """Returns the lines that have become complete.

        Raises:
            BlockingIOError: If the pipe has no data yet.
        """
        data = os.read(self.pipe.fileno(), CHUNK)
        lines = self._cutter.feed(data) if data else self._cutter.close()
        if self.hides_notices:
            lines = [line for line in lines if not _START_NOTICE.search(line)]
        self.tail.extend(lines)
        self.is_open = bool(data)
        return lines


def show(target: int, label: str, lines: Iterable[bytes]) -> OSError | None:
    """Writes lines with a label; returns the error if writing failed."""
    prefix = label.encode()
    return _write(target, b"".join(b"[%s] %s\n" % (prefix, line) for line in lines))


def say(text: str) -> None:
    """Writes a message of the launcher itself to stderr."""
    _write(2, f"tfgradcomp.launch: {text}\n".encode())


def _write(target: int, data: bytes) -> OSError | None:
    """Writes all of `data`, unbuffered; returns the error if writing failed."""
    try:
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                # The reader is slow, and the pipe that it shares does not block.
                select.select([], [target], [])
    except OSError as error:
        return error
    return None
