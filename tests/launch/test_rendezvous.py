"""Launchers of several hosts start the same attempt together."""

import json
import signal
import socket
import subprocess
import threading
import time

import pytest

from tests.launch.processes import TIMEOUT, needs_ipv6
from tfgradcomp.launch import rendezvous
from tfgradcomp.launch.ports import reserve_ports
from tfgradcomp.launch.rendezvous import LauncherRendezvous

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cluster():
    """Two free addresses, of which only the leader's is used for listening."""
    (lock,) = reserve_ports(1)
    with lock:
        yield [f"127.0.0.1:{lock.getsockname()[1]}", "[::1]:4000"]


def test_each_host_starts_its_worker_with_the_same_attempt(cluster, script, launch):
    # Worker 1 goes on for a while after worker 0 has died, as in an exchange.
    path = script("""
        print(json.dumps([CONFIG, ATTEMPT, time.time()]))
        time.sleep(2 * INDEX * (ATTEMPT == "0"))
        sys.exit(3 * (ATTEMPT == "0"))
    """)
    options = "--cluster", ",".join(cluster), "--max-restarts", "1", "--index"
    launchers = [launch(*options, index, path) for index in ("1", "0")]
    lines = []
    for launcher in launchers:
        output, errors = launcher.communicate(timeout=TIMEOUT)
        assert launcher.returncode == 0, errors
        assert "restart 1 of 1" in errors
        lines.append([json.loads(line[4:]) for line in output.splitlines()])
    for index, attempts in zip((1, 0), lines, strict=True):
        for count, (config, attempt, _) in enumerate(attempts):
            assert attempt == str(count)
            assert config == {
                "cluster": {"worker": cluster},
                "task": {"type": "worker", "index": index},
            }
    # The second attempt of worker 0 began after the first one of worker 1 had ended.
    assert lines[1][1][2] - lines[0][0][2] > 1.9


def agree(cluster, attempts, found):
    """Runs a rendezvous in a thread for each index of `attempts`."""

    def meet(index, attempt):
        reader, writer = socket.socketpair()
        with reader, writer:
            found[index] = LauncherRendezvous(cluster, index, reader).agree(attempt)

    threads = [threading.Thread(target=meet, args=item) for item in attempts.items()]
    for thread in threads:
        thread.start()
    return threads


@needs_ipv6
def test_the_launchers_of_hosts_with_ipv6_addresses_meet():
    (lock,) = reserve_ports(1)
    found = {}
    with lock:
        hosts = [f"[::1]:{lock.getsockname()[1]}", "[::1]:4000"]
        for thread in agree(hosts, {0: 0, 1: 1}, found):
            thread.join(30)
    assert found == {0: 1, 1: 1}


def test_a_launcher_that_was_started_anew_joins_the_attempt_of_the_others(cluster):
    found = {}
    hosts = [*cluster, "c:1"]
    # The worker of a failed attempt still listens, and answers with other bytes.
    port = int(cluster[0].rpartition(":")[2])
    with socket.create_server(("", port)) as stranger:
        threads = agree(hosts, {1: 2, 2: 0}, found)
        for _ in range(4):
            link, _ = stranger.accept()
            link.sendall(b"PRI * HTTP/2.0\r\n\r\n")
            link.close()
    # Connections that are of no launcher send nothing, nonsense, or a part of it.
    threads += agree(hosts, {0: 1}, found)
    lists = b'{"index": [1], "attempt": 0}\n'
    unknown = b'{"index": 7, "attempt": 9}\n'
    for text in (b"", b"nonsense\n", unknown, lists, b"a part of a line"):
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as link:
                    link.sendall(text)
                break
            except ConnectionRefusedError:
                if not threads[-1].is_alive():
                    break
                time.sleep(0.01)
    for thread in threads:
        thread.join(30)
    assert found == {0: 2, 1: 2, 2: 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("index", ["0", "1"])
def test_a_signal_ends_the_wait(cluster, index, script, launch):
    path = script("print('pid', os.getpid())")
    process = launch("--cluster", ",".join(cluster), "--index", index, path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM
    assert output == ""
    assert "SIGTERM before the workers started" in errors


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_launcher_is_named_and_the_wait_ends(
    cluster, index, monkeypatch, capfd
):
    monkeypatch.setattr(rendezvous, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.5)
    reader, writer = socket.socketpair()
    with reader, writer, pytest.raises(SystemExit) as caught:
        LauncherRendezvous(cluster, index, reader).agree(1)
    assert caught.value.code == 1
    errors = capfd.readouterr().err
    other = 1 - index
    assert f"waiting for the launchers of workers {other} ({cluster[other]})" in errors
    assert f"workers {other} ({cluster[other]}) have not come back" in errors
