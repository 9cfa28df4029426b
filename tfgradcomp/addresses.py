"""Addresses of processes, by IPv4 and IPv6, and sockets that listen at them."""

from __future__ import annotations

import contextlib
import socket


def split_address(address: str) -> tuple[str, str]:
    """Returns host and port of `"HOST:PORT"`, an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def listen_at(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address, or everywhere for a name.

    A name can mean this machine alone where other machines resolve it otherwise: that
    of a Debian machine is 127.0.1.1 on itself. An address may exist for others only,
    such as that of a service before its pods: then the socket listens everywhere, too.

    Args:
        host: Name or address, without brackets.
        port: The port; 0: a free one.

    Raises:
        OSError: If the port cannot be used.
    """
    flags = 0 if host == "localhost" else socket.AI_NUMERICHOST
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family)
    return listen_everywhere(port)


def listen_everywhere(port: int) -> socket.socket:
    """Returns a socket that listens at all addresses of this machine.

    Args:
        port: The port; 0: a free one.

    Raises:
        OSError: If the port cannot be used.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)
