"""A heartbeat of workers and servers: the chief waits for no stopped one without end.

A thread of the chief asks all tasks every now and then, by an RPC with a deadline.
After `TFGRADCOMP_STALL_WARNING` seconds (60) without an answer it says in one line
which task that is. A worker that does not answer for twice that long counts as lost:
the chief's connections with it are cut, so that every call of it ends in an error, in
whatever phase, as if the process had been killed. A parameter server holds state that
nobody else has, so it is waited for; after `TFGRADCOMP_STALL_TIMEOUT` seconds (never,
if not set) this process ends.
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

from tfgradcomp.collectives.stalls import EXIT_CODE, TIMEOUT, Limits
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.cluster import Cluster, Presence

_PERIOD_SECONDS = 1.0
# A process that has ended has closed its connections, a machine that vanished has not.
_GONE_SECONDS = 10.0
# More between two questions is time in which this process was stopped itself.
_MOST_SECONDS = 10.0


class Heartbeat(threading.Thread):
    """Watches the tasks of a cluster, as a context.

    Args:
        cluster: The tasks.
        limits: When to speak, and when to end.
    """

    def __init__(self, cluster: Cluster, limits: Limits):
        super().__init__(name="tfgradcomp-heartbeat", daemon=True)
        self._cluster, self._limits = cluster, limits
        self._is_over = threading.Event()

    def __enter__(self):
        # At the end of the interpreter no thread may be inside of gRPC.
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
            presences = self._cluster.presences(_PERIOD_SECONDS)
            now = time.monotonic()
            passed, last = min(now - last, _MOST_SECONDS), now
            for device, presence in presences.items():
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
                    self._warn(device, presence, seconds)
                if self._is_lost(device, presence, seconds):
                    # Again and again: gRPC would wait 20 s for a new connection.
                    disconnect(self._cluster.address(device))
                if presence is Presence.SILENT and device in self._cluster.servers:
                    self._end_if_late(device, seconds)

    def _warn(self, device, presence, seconds):
        address = self._cluster.address(device)
        text = "%s at %s %s, for %.0f s now"
        logger.warning(text, device, address, presence.value, seconds)

    def _is_lost(self, device, presence, seconds):
        if presence is Presence.GONE:
            return seconds >= _GONE_SECONDS
        is_late = seconds >= min(2 * self._limits.warning, self._limits.timeout)
        return is_late and device in self._cluster.workers

    def _end_if_late(self, device, seconds):
        if seconds >= self._limits.timeout:
            logger.error(
                "the chief ends, because %s at %s has not answered for %.0f s. Start "
                "all tasks again and resume from the last checkpoint. Received: %s=%g",
                *(device, self._cluster.address(device), seconds),
                *(TIMEOUT, self._limits.timeout),
            )
            os._exit(EXIT_CODE)


def disconnect(address: str) -> None:
    """Ends this process' connections with a host and port.

    What waits for an answer from there gets an error.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        peers = {(_ip(name[0]), name[1]) for *_, name in found}
        for descriptor in Path("/proc/self/fd").iterdir():
            _disconnect_if(int(descriptor.name), peers)


def _disconnect_if(descriptor, peers):
    # Whoever owns it may close it meanwhile; who listens has no peer.
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
