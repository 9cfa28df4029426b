"""Tasks that answer, are stopped or are lost, as the chief sees them."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import tensorflow as tf

from tfgradcomp.collectives.stalls import EXIT_CODE, Limits
from tfgradcomp.core.logging import logger
from tfgradcomp.parameter_server.cluster import Cluster, Presence
from tfgradcomp.parameter_server.heartbeat import Heartbeat

SERVER, FIRST, SECOND = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
NEVER = float("inf")

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def stopped_task():
    """The address of a task that accepts connections and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def running_task(address="127.0.0.1:0"):
    """The address of a task that answers every call."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port(address)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@contextlib.contextmanager
def proxy_without_task():
    """The address of a proxy that accepts connections and closes them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=close_all)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def address_of_nobody():
    with stopped_task() as address:
        return address


def test_presence_distinguishes_stopped_and_lost_tasks():
    with running_task() as running, stopped_task() as stopped:
        addresses = {SERVER: running, FIRST: stopped, SECOND: address_of_nobody()}
        cluster = Cluster(addresses)
        assert cluster.presences(cluster.devices, 0.5) == {
            SERVER: Presence.ANSWERS,
            FIRST: Presence.SILENT,
            SECOND: Presence.GONE,
        }
        cluster.check_servers()
        assert cluster.lost(dict.fromkeys((SERVER, SECOND), OSError())) == {SECOND}
        # An error that results from another error does not indicate a loss.
        target = f"from remote target {SERVER}"
        closed = tf.errors.CancelledError(None, None, f"queue is closed {target}")
        unknown = tf.errors.AbortedError(None, None, f"no such context {target}")
        assert cluster.lost({SERVER: closed}) == set()
        assert cluster.lost({SERVER: unknown}) == {SERVER}
        # A restarted task is noticed at once.
        with running_task(addresses[SECOND]):
            assert cluster.presences([SECOND]) == {SECOND: Presence.ANSWERS}
    with pytest.raises(ConnectionError, match="Parameter servers are gone.*ps/task:0"):
        Cluster({SERVER: addresses[SECOND]}).check_servers()


def test_a_task_behind_a_proxy_that_closes_is_gone():
    with proxy_without_task() as address:
        cluster = Cluster({FIRST: address})
        assert cluster.presences([FIRST]) == {FIRST: Presence.GONE}


def test_a_stopped_worker_is_named_and_disconnected(caplog):
    caplog.set_level("WARNING", logger.name)
    with running_task() as running, stopped_task() as stopped:
        host, port = stopped.split(":")
        cluster = Cluster({SERVER: running, FIRST: running, SECOND: stopped})
        with (
            socket.create_connection((host, int(port))) as waiting,
            socket.create_connection(running.split(":")) as other,
            Heartbeat(cluster, Limits(0.2, NEVER)),
        ):
            start = time.monotonic()
            waiting.settimeout(20)
            # A call that waits for an answer ends.
            assert waiting.recv(1) == b""
            assert time.monotonic() - start > 2 * 0.2
            assert other.getpeername()
    assert [record.getMessage().split(" at ")[0] for record in caplog.records] == [
        SECOND
    ]
    assert "does not answer (stopped)" in caplog.text


def test_a_stopped_server_ends_the_chief_only_after_the_limit(caplog, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with (
        stopped_task() as stopped,
        Heartbeat(Cluster({SERVER: stopped}), Limits(0.2, 2)),
    ):
        while not codes:
            time.sleep(0.05)
    assert {*codes} == {EXIT_CODE}
    assert "the chief ends, because /job:ps/task:0" in caplog.text
    assert "Received: TFGRADCOMP_STALL_TIMEOUT=2" in caplog.text
    caplog.clear()
    codes.clear()
    with (
        stopped_task() as stopped,
        Heartbeat(Cluster({SERVER: stopped}), Limits(0.2, NEVER)),
    ):
        time.sleep(2)
    assert codes == [] and "does not answer (stopped)" in caplog.text
