"""The tasks of a cluster, as the chief sees them, and the roles that serve."""

from __future__ import annotations

import enum
import functools
import os
import socket
import time
from collections.abc import Collection, Iterable

import grpc
import tensorflow as tf

from tfgradcomp.addresses import split_address
from tfgradcomp.compat import remote
from tfgradcomp.core.logging import logger
from tfgradcomp.ops import library

TASK_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
"""Errors of operations on a lost task."""

_THREADS = 16
_PROBE_SECONDS = 5.0
# For probes of tasks that may be absent.
_QUICK_PROBE_SECONDS = 2.0
_POLL_SECONDS = 0.5
# TensorFlow's servers answer this call while they compute.
_STATUS = "/tensorflow.WorkerService/GetStatus"
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # A restarted task must be noticed at once.
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_NO_ANSWER = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


class Presence(enum.Enum):
    """The state of a task, seen from another machine."""

    ANSWERS = "answers"
    SILENT = "does not answer (stopped)"
    GONE = "is gone or out of reach"


class Cluster:
    """The workers and parameter servers of a cluster, as the chief sees them.

    Args:
        addresses: Host and port of each task, by its device.

    Attributes:
        workers: The workers' devices, `/job:worker/...`.
        servers: The parameter servers' devices, `/job:ps/...`.
        devices: The devices of all workers and parameter servers.
    """

    def __init__(self, addresses: dict[str, str]):
        self.addresses = addresses
        self.devices = [*addresses]
        self._status = {
            device: grpc.insecure_channel(address, _CHANNEL_OPTIONS).unary_unary(
                _STATUS
            )
            for device, address in addresses.items()
        }
        self.workers = [device for device in addresses if "/job:worker/" in device]
        self.servers = [device for device in addresses if "/job:ps/" in device]

    def presences(
        self, devices: Iterable[str], seconds: float = _PROBE_SECONDS
    ) -> dict[str, Presence]:
        """Probes tasks at the same time; `seconds` is the time to answer."""
        calls = {d: self._status[d].future(b"", timeout=seconds) for d in devices}
        return {d: self._presence(d, call, seconds) for d, call in calls.items()}

    def _presence(self, device, call, seconds):
        error = call.exception()
        if not _is_silence(error):
            return Presence.ANSWERS
        # The kernel accepts connections for a stopped process.
        host, port = split_address(self.addresses[device])
        is_unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        try:
            with socket.create_connection((host, int(port)), _PROBE_SECONDS) as link:
                if is_unavailable and _is_closed(link):
                    return Presence.GONE
        except OSError:
            return Presence.GONE
        if is_unavailable:
            # gRPC does not notice a restarted task before a new connection.
            ask = self._status[device]
            call = ask.future(b"", timeout=seconds, wait_for_ready=True)
            if not _is_silence(call.exception()):
                return Presence.ANSWERS
        return Presence.SILENT

    def all_answer(self) -> bool:
        """Returns whether all tasks answer."""
        presences = self.presences(self.devices, _QUICK_PROBE_SECONDS)
        return {*presences.values()} == {Presence.ANSWERS}

    def wait_for_all(self) -> None:
        """Waits until all tasks answer."""
        while not self.all_answer():
            time.sleep(_POLL_SECONDS)

    def lost(self, errors: dict[str, Exception]) -> set[str]:
        """Returns the devices of lost tasks among those with an error."""
        presences = self.presences(errors)
        gone = {d for d, p in presences.items() if p is not Presence.ANSWERS}
        # A task that was restarted at once answers, but does not know this cluster.
        restarted = {
            device
            for device, error in errors.items()
            if isinstance(error, TASK_LOST)
            and f"target {device}" in str(error)
            and not met_closed_queue(error)
        }
        return gone | restarted

    def check_servers(self, lost: Collection[str] = ()) -> None:
        """Raises a ConnectionError if a parameter server is gone, or among the `lost`.

        A stopped server may continue; `Heartbeat` reports it and limits the wait.
        """
        presences = self.presences(self.servers)
        gone = [d for d, p in presences.items() if d in lost or p is Presence.GONE]
        if gone:
            raise ConnectionError(
                "Parameter servers are gone, and so is their state. Restart all tasks "
                "and resume from the last checkpoint, for example with "
                f"keras.callbacks.BackupAndRestore. Received: lost={gone}"
            )


def met_closed_queue(error: Exception) -> bool:
    """Returns whether an error results from queues that were closed after an error."""
    text = str(error)
    return "is closed" in text or "operation was cancelled" in text


def _is_silence(error):
    return error is not None and error.code() in _NO_ANSWER


def cluster_of_chief() -> Cluster:
    """Returns the cluster that `TF_CONFIG` describes; only the chief returns.

    Workers and parameter servers serve here until they are stopped. A cluster without a
    chief, workers or parameter servers is a ValueError.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    tasks = {job: spec.num_tasks(job) for job in spec.jobs}
    if tasks.get("chief") != 1 or not tasks.get("worker") or not tasks.get("ps"):
        raise ValueError(
            "TF_CONFIG must describe a cluster of one chief, workers and parameter "
            "servers, and the task of this process. `python -m tfgradcomp.launch "
            f"--workers 2 --ps 1 script.py` sets it. Received: tasks={tasks}"
        )
    if resolver.task_type in ("worker", "ps"):
        _serve(resolver)
    return Cluster(
        {
            f"/job:{job}/replica:0/task:{index}": spec.task_address(job, index)
            for job in ("worker", "ps")
            for index in range(spec.num_tasks(job))
        }
    )


@functools.cache
def connect(config: str) -> tf.distribute.Strategy:
    """Connects this process, the chief, to all tasks, once per value of `TF_CONFIG`.

    All variables of the process lose their values.
    """
    remote.make_constants_here()
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )


def _serve(resolver):
    """Serves as a worker or a parameter server until the process ends."""
    try:
        library.library()
    except library.UnavailableError as error:
        logger.warning("the native operations are missing here: %s", error)
    # Each operation that waits for another task may occupy a thread. With too few
    # threads they would deadlock; waiting threads need no core.
    threads = int(os.environ.get("TF_NUM_INTEROP_THREADS", 0))
    threads = max(_THREADS, threads, os.cpu_count() or 1)
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
    )
    server.join()


def _is_closed(link: socket.socket) -> bool:
    """Returns whether a connection ends at once, as that of a proxy without its task.

    A server of gRPC writes first.
    """
    try:
        return not link.recv(1)
    except TimeoutError:
        return False
