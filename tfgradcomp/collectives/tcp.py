"""Collectives over TCP connections of our own, instead of TensorFlow's over gRPC."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import Collectives
from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.collectives.connections import connect_all
from tfgradcomp.collectives.replicas import Hosts, Replicas, ordering_token
from tfgradcomp.core.digest import digest64
from tfgradcomp.core.logging import logger
from tfgradcomp.ops import library
from tfgradcomp.ops.dispatch import takes_native

CARRIERS = ("auto", "grpc", "tcp")
# Until a connection fails. Workers connect at the same time, having met before.
_SECONDS = {"auto": 10.0, "tcp": 60.0}


class TcpCollectives(Collectives):
    """Collectives between processes of one device each, with the bits of TensorFlow's.

    Floats are added in the order of TensorFlow's ring. The sign of a maximum that is
    zero may differ.

    Args:
        replicas: TensorFlow's collectives between the same processes.
        mesh: Number of the connections in this process.
    """

    def __init__(self, replicas: Replicas, mesh: int):
        self.num_workers = replicas.num_workers
        self.process_index = replicas.process_index
        self.num_processes = replicas.num_processes
        self._replicas, self.mesh = replicas, mesh

    @property
    @override
    def rank(self):
        return self.process_index

    @override
    def renewed(self):
        return TcpCollectives(self._replicas.renewed(), self.mesh)

    @override
    def gather(self, vector, call_site):
        return self._call("gather", vector, call_site)

    @override
    def all_to_all(self, rows, call_site):
        return self._call("all_to_all", rows, call_site)

    @override
    def sum(self, vector, call_site):
        return self._call("reduce", vector, call_site, merge="sum")

    @override
    def max(self, vector, call_site):
        return self._call("reduce", vector, call_site, merge="max")

    def _call(self, operation, vector, call_site, **merge):
        name = f"{merge.get('merge', operation)} of {call_site}"
        site = self._replicas.site(name)
        function = getattr(library.library().operations, f"tfgradcomp_tcp_{operation}")
        return SITES.around(
            site,
            lambda entered: function(
                entered,
                ordering_token=ordering_token(name, local_replicas=1),
                num_workers=self.num_workers,
                mesh=self.mesh,
                site=digest64(site.encode()),
                call_site=site,
                **merge,
            ),
            vector,
        )


for _op in ("Gather", "AllToAll", "Reduce"):
    tf.no_gradient(f"Tfgradcomp>Tcp{_op}")


def over_carrier(
    carrier: str, replicas: Collectives, hosts: Hosts
) -> tuple[Collectives, Collectives]:
    """Returns the collectives of a carrier: between replicas, and between processes.

    All processes must call it. The first call connects them. `"auto"` is `"tcp"` where
    all processes have one CPU device and native operations and connect to each other
    in 10 seconds, otherwise `"grpc"`; then the log says why, but for GPUs.

    Raises:
        ValueError: If a process has GPUs, or several devices, with `"tcp"`.
        RuntimeError: If a process has no native operations, or cannot be connected to,
            with `"tcp"`.
    """
    is_cpu = len(hosts.devices) == 1 and "GPU" not in hosts.devices[0]
    if is_cpu and isinstance(replicas, Replicas):
        over_tcp = None if carrier == "grpc" else _connected(hosts, carrier)
        if over_tcp is not None:
            return TcpCollectives(replicas, over_tcp.mesh), over_tcp
    elif carrier == "tcp":
        raise ValueError(
            "carrier='tcp' is for workers of one CPU device each; GPUs exchange by "
            "NCCL. Use carrier='grpc', which leaves the exchange to TensorFlow. "
            f"Received: devices={hosts.devices}"
        )
    return replicas, hosts


def between_processes(hosts: Hosts) -> Collectives:
    """Returns the quickest collectives: over TCP if the processes are connected."""
    return _over_tcp.get(hosts) or hosts


# Measurements are kept by object. None: the processes could not connect.
_over_tcp: dict[Hosts, TcpCollectives | None] = {}


def _connected(hosts, carrier):
    """Connects the processes, once; returns the collectives between them.

    Where they cannot connect, it returns None with `"auto"`, and raises otherwise.
    """
    if hosts not in _over_tcp or (carrier == "tcp" and _over_tcp[hosts] is None):
        try:
            _over_tcp[hosts] = TcpCollectives(hosts, _connect(hosts, carrier))
        except RuntimeError as error:
            if carrier == "tcp":
                raise
            logger.info("messages travel by gRPC, which is slower: %s", error)
            _over_tcp[hosts] = None
    return _over_tcp[hosts]


def _connect(hosts, carrier):
    """Connects the processes; returns the number of the connections."""
    path, missing = _library(carrier)
    obstacle = missing and (
        f"carrier='tcp' needs native operations, and worker {hosts.rank} has none. "
        f"Use carrier='grpc'. Received: {missing}"
    )
    links = connect_all(hosts, obstacle, _SECONDS[carrier])
    # The native threads own the sockets from here on.
    sockets = [-1 if link is None else link.detach() for link in links]
    os.register_at_fork(after_in_child=functools.partial(_close, sockets))
    start = ctypes.CDLL(str(path)).tfgradcomp_start_mesh
    start.restype = ctypes.c_int64
    # The ring adds up in the order of TensorFlow's.
    order, ints = hosts.order, ctypes.c_int * len(sockets)
    of_ring = ints(*(sockets[rank] for rank in order))
    return start(order.index(hosts.rank), len(sockets), of_ring, ints(*order))


def _close(sockets):
    """Closes sockets in a forked child, which would hide the end of this process."""
    for socket in sockets:
        with contextlib.suppress(OSError):
            os.close(socket)


def _library(carrier):
    """Returns the path of the native library, and why there is none."""
    if carrier == "auto" and not takes_native("tcp_gather"):
        return Path(), "pure TensorFlow has been chosen"
    try:
        return library.library().path, ""
    except library.UnavailableError as error:
        return Path(), str(error)
