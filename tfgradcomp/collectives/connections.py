"""TCP connections between all processes of a cluster, each pair with one.

A process that connects shows the listener's token, and the listener shows that of the
process. Tokens are random and travel by collectives of TensorFlow. Nothing else is read
from a connection before.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import time

import numpy as np
import tensorflow as tf

from tfgradcomp.addresses import listen_at
from tfgradcomp.collectives.replicas import Hosts

CARRIER_PORT = "TFGRADCOMP_CARRIER_PORT"
_TOKEN_BYTES = 32
_RANK_BYTES = 4
_REASON_BYTES = 512


def connect_all(
    hosts: Hosts, obstacle: str, seconds: float
) -> list[socket.socket | None]:
    """Connects this process to each other one; all processes must call it.

    Args:
        hosts: The collectives between the processes.
        obstacle: Why this process cannot take part; "" if it can.
        seconds: Until a connection fails.

    Returns:
        A socket for each process, by rank; None for this one.

    Raises:
        RuntimeError: On all processes, if one cannot take part or connect in time, with
            the reason, which is that of the first process that could not connect.
    """
    own_token = secrets.token_bytes(_TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        host, wanted = hosts.names[hosts.rank], os.environ.get(CARRIER_PORT, "0")
        port = 0
        if not obstacle:
            try:
                listener = stack.enter_context(listen_at(host, int(wanted)))
                port = listener.getsockname()[1]
            except (OSError, OverflowError, ValueError) as error:
                obstacle = (
                    f"worker {hosts.rank} cannot listen at {host}, port {wanted} "
                    f"({CARRIER_PORT}, 0 for any): {error}. Use carrier='grpc'"
                )
        row = [port, *np.frombuffer(own_token, np.int32)]
        rows = _gather_if_all_can(hosts, "carrier", obstacle, row)
        peers = [
            (name, int(row[0]), row[1:].tobytes())
            for name, row in zip(hosts.names, rows, strict=True)
        ]
        links: list[socket.socket | None] = []
        waited = False
        try:
            links = exchange_tokens(listener, hosts.rank, peers, seconds)
        except (OSError, RuntimeError) as error:
            obstacle, waited = str(error), isinstance(error, TimeoutError)
    try:
        _gather_if_all_can(hosts, "vote on the carrier", obstacle, [int(waited)])
    except RuntimeError:
        for link in filter(None, links):
            link.close()
        raise
    return links


def _gather_if_all_can(
    hosts: Hosts, call_site: str, obstacle: str, row: list[int]
) -> np.ndarray:
    """Returns the rows of all processes, if none of them has an obstacle.

    Raises:
        RuntimeError: On all processes, if one has an obstacle, with that of the process
            whose row begins with the least number, and of these the first.
    """
    reason = obstacle.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    words = np.frombuffer(reason, np.int32)
    own = np.array([*words, *row], np.int32)
    rows = hosts.gather(tf.constant(own), call_site).numpy()
    reasons, rows = np.split(rows, [len(words)], axis=1)
    failed = np.flatnonzero(reasons.any(axis=1))
    if failed.size:
        first = failed[np.argmin(rows[failed, 0])]
        reason = reasons[first].tobytes().rstrip(b"\0")
        raise RuntimeError(reason.decode(errors="ignore"))
    return rows


def exchange_tokens(
    listener: socket.socket,
    rank: int,
    peers: list[tuple[str, int, bytes]],
    seconds: float,
) -> list[socket.socket | None]:
    """Connects to the processes of lower ranks, and waits for those of higher ones.

    Args:
        listener: This process' listening socket.
        rank: The rank of this process.
        peers: Host, port and token of each process.
        seconds: Until it fails.

    Raises:
        RuntimeError: If this process cannot connect to another one.
        TimeoutError: If another one does not come in time, most often because it could
            not connect to a third one.
    """
    deadline = time.monotonic() + seconds
    links: list[socket.socket | None] = [None] * len(peers)
    own_token = peers[rank][2]
    for other in range(rank):
        host, port, token = peers[other]
        try:
            left = max(deadline - time.monotonic(), 0.1)
            link = socket.create_connection((host, port), left)
            link.sendall(token + rank.to_bytes(_RANK_BYTES, "little"))
            answer = link.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            if not hmac.compare_digest(answer, own_token):
                raise OSError("it shows another token")
        except OSError as error:
            raise RuntimeError(
                f"worker {rank} cannot connect to worker {other} for carrier='tcp'. "
                "Open the ports between the workers, or use carrier='grpc'. "
                f"Received: address={host}:{port}, {error}"
            ) from error
        links[other] = link
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while None in links[rank + 1 :]:
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                missing = [i for i in range(rank + 1, len(peers)) if links[i] is None]
                raise TimeoutError(
                    f"worker {rank} waits for connections of other workers for "
                    f"carrier='tcp', and they have not come in {seconds:.0f} s. Open "
                    "the ports between the workers, or use carrier='grpc'. "
                    f"Received: workers={missing}"
                )
            for key, _ in ready:
                if key.data is None:
                    _accept(listener, selector)
                    continue
                link = key.data
                selector.unregister(link)
                other = _rank_behind_token(link, own_token)
                if rank < other < len(peers) and links[other] is None:
                    link.sendall(peers[other][2])
                    links[other] = link
                else:
                    link.close()
        for key in list(selector.get_map().values()):
            if key.data is not None:
                key.data.close()
    return links


def _accept(listener, selector):
    link, _ = listener.accept()
    link.setblocking(False)
    # It is ready when all has come, so that nobody is waited for.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _TOKEN_BYTES + _RANK_BYTES)
    selector.register(link, selectors.EVENT_READ, link)


def _rank_behind_token(link, token):
    """Returns the rank that a process has sent behind a token; -1: another token."""
    try:
        shown = link.recv(_TOKEN_BYTES + _RANK_BYTES)
    except OSError:
        return -1
    if not hmac.compare_digest(shown[:_TOKEN_BYTES], token):
        return -1
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return int.from_bytes(shown[_TOKEN_BYTES:], "little")
