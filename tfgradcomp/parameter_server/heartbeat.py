"""A heartbeat that detects stopped workers and servers.

A thread of the chief probes all tasks regularly, by RPCs with a deadline. After
`TFGRADCOMP_STALL_WARNING` seconds (60) without an answer, it logs the task. A worker
that does not answer for twice as long counts as lost: the thread closes the chief's
connections to it, so that all its calls end in errors, as if its process had been
killed. A parameter server holds state that exists nowhere else, so the chief waits for
it; after `TFGRADCOMP_STALL_TIMEOUT` seconds (unset: never) the chief ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import socket
import stat
import threading
import time
from pathlib import Path

from typing_extensions import override

from tfgradcomp.addresses import split_address
from tfgradcomp.collectives.stalls import Limits
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.cluster import Cluster, Presence

_PERIOD_SECONDS = 1.0
# A process that ends closes its connections; an unreachable machine does not.
_GONE_SECONDS = 10.0
# A longer time between two probes means that this process itself was stopped.
_MOST_SECONDS = 10.0


class Heartbeat(threading.Thread):
    """Context manager that probes the tasks of a cluster in a thread."""

    def __init__(self, cluster: Cluster, limits: Limits):
        super().__init__(name="tfgradcomp-heartbeat", daemon=True)
        self._cluster, self._limits = cluster, limits
        self._is_over = threading.Event()

    def __enter__(self):
        # When the interpreter exits, no thread may execute gRPC code.
        atexit.register(self._is_over.set)
        self.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self.join()
        atexit.unregister(self._is_over.set)

    @override
    def run(self):
        last = time.monotonic()
        silence = dict.fromkeys(self._cluster.devices, 0.0)
        warned: set[str] = set()
        while not self._is_over.wait(min(_PERIOD_SECONDS, self._limits.warning / 4)):
            presences = self._cluster.presences(silence, _PERIOD_SECONDS)
            now = time.monotonic()
            passed, last = min(now - last, _MOST_SECONDS), now
            for device, presence in presences.items():
                address = self._cluster.addresses[device]
                if presence is Presence.ANSWERS:
                    silence[device] = 0.0
                    if device in warned:
                        logger.warning("%s answers again", device)
                    warned.discard(device)
                    continue
                silence[device] += passed
                seconds = silence[device]
                if seconds >= min(self._limits) and device not in warned:
                    warned.add(device)
                    text = "%s at %s %s, for %.0f s now"
                    logger.warning(text, device, address, presence.value, seconds)
                if self._is_lost(device, presence, seconds):
                    # Repeatedly, because gRPC waits 20 s for a new connection.
                    disconnect(address)
                if presence is Presence.SILENT and device in self._cluster.servers:
                    self._limits.end_if_late(
                        seconds,
                        "the chief ends, because %s at %s has not answered for %.0f s. "
                        "Restart all tasks and resume from the last checkpoint.",
                        device,
                        address,
                        seconds,
                    )

    def _is_lost(self, device, presence, seconds):
        if presence is Presence.GONE:
            return seconds >= _GONE_SECONDS
        is_late = seconds >= min(2 * self._limits.warning, self._limits.timeout)
        return is_late and device in self._cluster.workers


def disconnect(address: str) -> None:
    """Closes this process' connections to a host and port.

    Calls that wait for an answer from there end with an error.
    """
    host, port = split_address(address)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        peers = {(_ip(name[0]), name[1]) for *_, name in found}
        for descriptor in Path("/proc/self/fd").iterdir():
            _disconnect_if(int(descriptor.name), peers)


def _disconnect_if(descriptor, peers):
    # The descriptor's owner may close it meanwhile; a listening socket has no peer.
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6):
                host, port = link.getpeername()[:2]
                if (_ip(host), port) in peers:
                    link.shutdown(socket.SHUT_RDWR)


def _ip(host):
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
