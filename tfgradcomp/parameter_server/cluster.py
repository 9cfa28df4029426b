"""The tasks of a cluster: the roles that serve, and who answers the chief."""

from __future__ import annotations

import enum
import functools
import os
import socket
import time
from collections.abc import Collection

import grpc
import tensorflow as tf

from tfgradcomp.compat import remote
from tfgradcomp.core.logging import logger
from tfgradcomp.ops import library

TASK_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
"""The errors of operations on a task that is gone."""

_THREADS = 16
_PROBE_SECONDS = 5.0
# Where a task that is not there is no error.
_QUICK_PROBE_SECONDS = 2.0
_POLL_SECONDS = 0.5
# TensorFlow's servers answer it by themselves, whatever they compute.
_STATUS = "/tensorflow.WorkerService/GetStatus"
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # A task that was started again is to be seen at once.
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_NO_ANSWER = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


class Presence(enum.Enum):
    """The state of a task, as far as it can be seen from another machine."""

    ANSWERS = "answers"
    SILENT = "does not answer (stopped)"
    GONE = "is gone or out of reach"


class Cluster:
    """The workers and parameter servers of a cluster, as the chief sees them.

    Attributes:
        workers: The workers' devices, `/job:worker/...`.
        servers: The parameter servers' devices, `/job:ps/...`.
    """

    def __init__(self, addresses: dict[str, str]):
        """Creates a cluster.

        Args:
            addresses: Host and port of each task, by their devices.
        """
        self._addresses = addresses
        self._status = {
            device: grpc.insecure_channel(address, _CHANNEL_OPTIONS).unary_unary(
                _STATUS
            )
            for device, address in addresses.items()
        }
        self.workers = [device for device in addresses if "/job:worker/" in device]
        self.servers = [device for device in addresses if "/job:ps/" in device]

    @property
    def devices(self) -> list[str]:
        """The devices of all workers and parameter servers."""
        return [*self._addresses]

    def address(self, device: str) -> str:
        """Returns the host and port of a task."""
        return self._addresses[device]

    def presences(self, seconds: float = _PROBE_SECONDS) -> dict[str, Presence]:
        """Returns the states of all tasks, which are asked at once.

        Args:
            seconds: Time that a task has to answer.
        """
        calls = {d: ask.future(b"", timeout=seconds) for d, ask in self._status.items()}
        return {d: self._presence(d, call, seconds) for d, call in calls.items()}

    def presence(self, device: str) -> Presence:
        """Returns the state of a task."""
        call = self._status[device].future(b"", timeout=_PROBE_SECONDS)
        return self._presence(device, call, _PROBE_SECONDS)

    def _presence(self, device, call, seconds):
        error = call.exception()
        if not _is_silence(error):
            return Presence.ANSWERS
        # Where a process is stopped, the kernel still accepts its connections.
        host, _, port = self._addresses[device].rpartition(":")
        try:
            address = host.strip("[]"), int(port)
            socket.create_connection(address, _PROBE_SECONDS).close()
        except OSError:
            return Presence.GONE
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            # One that was started again is not known to gRPC before it has connected.
            ask = self._status[device]
            call = ask.future(b"", timeout=seconds, wait_for_ready=True)
            if not _is_silence(call.exception()):
                return Presence.ANSWERS
        return Presence.SILENT

    def answers(self, device: str) -> bool:
        """Returns whether a task answers."""
        return self.presence(device) is Presence.ANSWERS

    def all_answer(self) -> bool:
        """Returns whether all tasks answer."""
        presences = self.presences(_QUICK_PROBE_SECONDS)
        return all(p is Presence.ANSWERS for p in presences.values())

    def wait_for_all(self) -> None:
        """Waits until all tasks answer."""
        while not self.all_answer():
            time.sleep(_POLL_SECONDS)

    def lost(self, errors: dict[str, Exception]) -> set[str]:
        """Returns the devices of tasks that are gone, of those that have an error."""
        gone = {device for device in errors if not self.answers(device)}
        # One that was started again at once answers, but does not know this cluster.
        new = {
            device
            for device, error in errors.items()
            if isinstance(error, TASK_LOST)
            and f"target {device}" in str(error)
            and not met_closed_queue(error)
        }
        return gone | new

    def check_servers(self, lost: Collection[str] = ()) -> None:
        """Checks that all parameter servers are there.

        One that is stopped may go on; `Heartbeat` says so, and ends the wait for it.

        Args:
            lost: Devices of tasks that are known to be gone.

        Raises:
            ConnectionError: If a server is among them, or is gone.
        """
        gone = [
            device
            for device in self.servers
            if device in lost or self.presence(device) is Presence.GONE
        ]
        if gone:
            raise ConnectionError(
                "Parameter servers are gone, with the state that they held. Start all "
                "tasks again and resume from the last checkpoint, for example by "
                f"keras.callbacks.BackupAndRestore. Received: {gone}"
            )


def met_closed_queue(error: Exception) -> bool:
    """Returns whether an error follows from queues that were closed after another."""
    text = str(error)
    return "is closed" in text or "operation was cancelled" in text


def _is_silence(error):
    return error is not None and error.code() in _NO_ANSWER


def cluster_of_chief() -> Cluster:
    """Returns the cluster that `TF_CONFIG` describes, on its chief.

    Workers and parameter servers serve instead, and never return.

    Raises:
        ValueError: If it is no cluster of a chief, workers and parameter servers.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    tasks = {job: spec.num_tasks(job) for job in spec.jobs}
    if tasks.get("chief") != 1 or not tasks.get("worker") or not tasks.get("ps"):
        raise ValueError(
            "TF_CONFIG must describe a cluster of one chief, workers and parameter "
            "servers, and the task that this process is. `python -m tfgradcomp.launch "
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


def connect() -> None:
    """Connects this process, the chief, with all tasks of `TF_CONFIG`, once.

    The process loses the values of all variables that it has by then.
    """
    _connect(os.environ["TF_CONFIG"])


@functools.cache
def _connect(config):
    remote.make_constants_here()
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )


def _serve(resolver):
    """Serves as the worker or the parameter server that `resolver` says, for ever."""
    try:
        library.library()
    except library.UnavailableError as error:
        logger.warning("the native operations are missing here: %s", error)
    # What waits for other tasks may hold a thread each; were all held, it would wait
    # for ever. Waiting threads cost no core.
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
