"""Settings of gRPC that a hub and its clients share."""

from __future__ import annotations

import ipaddress

from tfgradcomp.addresses import split_address

METHOD = "Exchange"
SERVICE = "tfgradcomp.Federated"

_SPARE = 4096
"""Bytes of a message beside its payload, statistics and descriptions."""


def options(most_bytes: int) -> list[tuple[str, int]]:
    """Returns the options of a channel or a server.

    Peers that do not answer a ping within 20 s are gone: an address translation has
    dropped their connection, or their machine is off.

    Args:
        most_bytes: Length of the longest message that is accepted, without head and
            small fields.
    """
    return [
        ("grpc.max_receive_message_length", most_bytes + _SPARE),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 0),
    ]


def check_security(address: str, credentials: object, insecure: bool) -> None:
    """Raises ValueError unless a connection is secured or stays on this machine.

    Args:
        address: The address, `"host:port"`.
        credentials: Credentials of gRPC, or None.
        insecure: Whether there shall be none.
    """
    if insecure == (credentials is not None):
        raise ValueError(
            "Give either credentials=..., as tfgradcomp.federated.certificates makes "
            "them, or insecure=True for programs on one machine. "
            f"Received: insecure={insecure}, credentials={credentials}"
        )
    if insecure and not _is_loopback(split_address(address)[0]):
        raise ValueError(
            "insecure=True is for programs on one machine: anyone who reaches the port "
            "could read and change the model. Give credentials=..., or an address of "
            f"127.0.0.1. Received: address={address!r}"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
