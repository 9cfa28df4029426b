"""Collectives over TCP connections of our own, instead of TensorFlow's over gRPC."""

from __future__ import annotations

import ctypes
import functools
import os

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import CollectiveCall, Collectives
from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.collectives.connections import connect_all
from tfgradcomp.collectives.replicas import Hosts, Replicas, ordering_token
from tfgradcomp.core.digest import digest64
from tfgradcomp.ops import library

CARRIERS = ("grpc", "tcp")


class TcpCollectives(Collectives):
    """Collectives between processes, with the bits of TensorFlow's.

    Words are gathered, and then added or compared by each worker. That gives other bits
    than the ring of TensorFlow for sums of floats, so they are left to TensorFlow.

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
    def words_sent(self, call):
        kind = "gather" if call.kind == "max" else call.kind
        return CollectiveCall(kind, call.words).words_sent(self.num_workers)

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
        if not vector.dtype.is_integer:
            return self._replicas.sum(vector, call_site)
        call_site = f"sum/{call_site}"
        count = self.num_workers
        if count == 2:
            return tf.add_n(tf.unstack(self.gather(vector, call_site)))
        size = tf.size(vector)
        rows = tf.reshape(tf.pad(vector, [[0, -size % count]]), [count, -1])
        part = tf.add_n(tf.unstack(self.all_to_all(rows, call_site)))
        return tf.reshape(self.gather(part, call_site), [-1])[:size]

    @override
    def max(self, vector, call_site):
        return tf.reduce_max(self.gather(vector, f"max/{call_site}"), axis=0)

    def _call(self, kind, vector, call_site):
        replicas, name = self._replicas, f"{kind} of {call_site}"
        site = replicas.site(name)
        operation = getattr(library.library().operations, f"tfgradcomp_tcp_{kind}")
        return SITES.around(
            site,
            lambda entered: operation(
                entered,
                # Calls wait in no thread, so that each has an order of its own.
                ordering_token(name, 1),
                num_workers=self.num_workers,
                mesh=self._mesh,
                site=digest64(f"{site} {replicas.part}".encode()),
                call_site=site,
            ),
            vector,
            replicas.replica,
        )


for _op in ("TcpGather", "TcpAllToAll"):
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
