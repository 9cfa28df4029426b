"""Signals to the launcher, readable from a socket."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def signal_socket() -> Iterator[socket.socket]:
    """Yields a socket that receives the numbers of arriving signals.

    The signals are SIGCHLD, SIGINT, SIGTERM and SIGHUP; SIGHUP is left out where it is
    ignored, as under nohup.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signums = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signums.append(signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signums}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        reader.close()
        writer.close()
