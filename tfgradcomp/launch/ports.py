"""Reservation of TCP ports for the workers on this machine."""

from __future__ import annotations

import contextlib
import random
import socket


def reserve_ports(count: int) -> list[socket.socket]:
    """Reserves `count` TCP ports; returns sockets to hold while the workers serve.

    TensorFlow's gRPC server binds the wildcard address without SO_REUSEPORT: a TCP
    socket held here would block the server, and a socket closed just before would leave
    a gap. The lock is the UDP port of the same number. It excludes other launchers on
    this machine, in any container that shares the network, and is released however the
    launcher ends. Ports lie outside the kernel's range for clients, so no outgoing
    connection takes one.

    Raises:
        RuntimeError: If there are fewer free ports.
    """
    ports = _ports_of_servers()
    locks = []
    for port in random.sample(ports, len(ports)):
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind(("", port))
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            lock.close()
            continue
        locks.append(lock)
        if len(locks) == count:
            return locks
    raise RuntimeError(
        f"found {len(locks)} free ports between {ports[0]} and {ports[-1]}, but "
        f"{count} workers need {count}: end other servers or start fewer workers"
    )


def local_address(lock: socket.socket) -> str:
    """Returns the address of a reserved port on this machine."""
    return f"127.0.0.1:{lock.getsockname()[1]}"


def _ports_of_servers() -> list[int]:
    """Returns ports that the kernel does not give to outgoing connections."""
    low, high = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    ports = range(10000, 30000)  # Kubernetes assigns the next 2768 itself.
    return [port for port in ports if not low <= port <= high] or list(ports)
