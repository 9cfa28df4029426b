"""Collectives over TCP connections of our own, instead of TensorFlow's over gRPC."""

from __future__ import annotations

import ctypes
import functools
import os

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import Collectives
from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.collectives.connections import connect_all
from tfgradcomp.collectives.replicas import Hosts, Replicas, ordering_token
from tfgradcomp.core.digest import digest64
from tfgradcomp.ops import library

CARRIERS = ("grpc", "tcp")


class TcpCollectives(Collectives):
    """Collectives between processes, with the bits of TensorFlow's.

    Sums of floats are added in the order of TensorFlow's ring.

    Args:
        replicas: TensorFlow's collectives between the same workers.
        mesh: Number of the connections, from `start_mesh`.
    """

    def __init__(self, replicas: Replicas, mesh: int):
        self.num_workers = replicas.num_workers
        self.process_index = replicas.process_index
        self.num_processes = replicas.num_processes
        self._replicas, self._mesh = replicas, mesh

    @property
    @override
    def rank(self):
        return self._replicas.rank

    @override
    def renewed(self):
        return TcpCollectives(self._replicas.renewed(), self._mesh)

    @override
    def gather(self, vector, call_site):
        if self._replicas.meets_eagerly():
            return self._replicas.gather(vector, call_site)
        return self._call("gather", vector, call_site)

    @override
    def all_to_all(self, rows, call_site):
        if self._replicas.meets_eagerly():
            return self._replicas.all_to_all(rows, call_site)
        return self._call("all_to_all", rows, call_site)

    @override
    def sum(self, vector, call_site):
        if self._replicas.meets_eagerly():
            return self._replicas.sum(vector, call_site)
        return self._call("sum", vector, call_site)

    @override
    def max(self, vector, call_site):
        if self._replicas.meets_eagerly():
            return self._replicas.max(vector, call_site)
        return self._call("max", vector, call_site)

    def _call(self, kind, vector, call_site):
        replicas, name = self._replicas, f"{kind} of {call_site}"
        site, operations = replicas.site(name), library.library().operations
        operation = {
            "gather": operations.tfgradcomp_tcp_gather,
            "all_to_all": operations.tfgradcomp_tcp_all_to_all,
        }.get(kind) or functools.partial(operations.tfgradcomp_tcp_reduce, merge=kind)
        return SITES.around(
            site,
            lambda entered: operation(
                entered,
                # Calls wait in no thread, so that each has an order of its own.
                ordering_token=ordering_token(name, 1),
                num_workers=self.num_workers,
                mesh=self._mesh,
                site=digest64(f"{site} {replicas.part}".encode()),
                call_site=site,
            ),
            vector,
            replicas.replica,
        )


for _op in ("TcpGather", "TcpAllToAll", "TcpReduce"):
    tf.no_gradient(f"Tfgradcomp>{_op}")


@functools.cache
def start_mesh(hosts: Hosts) -> int:
    """Connects the processes, once; all of them must call it.

    Returns:
        The number of the connections in this process.

    Raises:
        RuntimeError: If a process has no native library, or cannot be connected to.
    """
    obstacle = ""
    try:
        loaded = library.library()
    except library.UnavailableError as error:
        obstacle = f"no native operations: {error}"
    links = connect_all(hosts, obstacle)
    start = ctypes.CDLL(os.fspath(loaded.path)).tfgradcomp_start_mesh
    start.restype = ctypes.c_int64
    sockets = [-1 if link is None else link.detach() for link in links]
    return start(hosts.rank, len(links), (ctypes.c_int * len(links))(*sockets))


def over_tcp(replicas: Replicas, hosts: Hosts) -> tuple[Collectives, Collectives]:
    """Returns two collectives over TCP: between replicas and between processes.

    All processes must call it.
    """
    between_hosts = _hosts_over_tcp(hosts)
    return TcpCollectives(replicas, start_mesh(hosts)), between_hosts


@functools.cache
def _hosts_over_tcp(hosts):
    # Measurements are kept by object.
    return TcpCollectives(hosts, start_mesh(hosts))
