"""Hosts in network namespaces, and the benchmark on them: as root only."""

import csv
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.scripts import (
    alive,
    descendants,
    import_script,
    rows_of,
    run,
    start,
)

cluster = import_script("cluster")
FEW = ("--workload", "lenet", "--workers", 2, "--rounds", 2, "--no-torch")


def namespaces():
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def of(pid):
    return {name for name in namespaces() if name.startswith(f"tfgradcomp-{pid}-")}


def test_bytes_are_counted_and_links_carry_them(permitted):
    # 10 Mbit/s: slow enough that TCP's own bytes are the same for everyone.
    size = 500_000
    with cluster.virtual_cluster(3, "10mbit") as hosts:
        assert len(of(os.getpid())) == 4
        before = [host.counters() for host in hosts]
        rate = cluster.tcp_rate(hosts[0], hosts[2], size)
        after = [host.counters() for host in hosts]
        inside = subprocess.run(
            hosts[0].command(
                *(sys.executable, "-c"),
                "import cluster; print(*cluster.interface_bytes('eth0'))",
            ),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        seen = tuple(map(int, inside.stdout.split()))
        # The kernel may send some bytes of its own between two looks.
        for least, count, most in zip(after[0], seen, hosts[0].counters(), strict=True):
            assert least <= count <= most
    sent = [b.sent - a.sent for a, b in zip(before, after, strict=True)]
    received = [b.received - a.received for a, b in zip(before, after, strict=True)]
    assert size < sent[0] < 1.15 * size
    assert size < received[2] < 1.15 * size
    assert sent[1] + received[1] < 10_000
    # A shaper cannot be faster than its rate, but for the burst at the start.
    assert rate < 10e6 * (1 + 2 * 16384 / size)
    assert of(os.getpid()) == set()


def test_a_cluster_ends_what_runs_in_it_and_itself(permitted):
    with pytest.raises(KeyError):
        with cluster.virtual_cluster(1, "1gbit") as (host,):
            sleeper = subprocess.Popen(host.command("sleep", "600"))
            # Until then it is not in the namespace.
            deadline = time.monotonic() + 60
            while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise KeyError
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    assert of(os.getpid()) == set()


def test_a_link_gets_another_rate(permitted):
    with cluster.virtual_cluster(2, "10mbit") as (first, second):
        first.shape("2gbit")
        shown = [
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "show", "dev", link],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for host in (first, second)
            for namespace, link in (
                (host.namespace, cluster.INTERFACE),
                (host.switch, host.port),
            )
        ]
    rates = [text.partition(" rate ")[2].split()[0] for text in shown]
    assert rates == ["2Gbit", "2Gbit", "10Mbit", "10Mbit"]


def test_what_a_dead_run_left_is_removed(permitted):
    dead = subprocess.Popen(["true"])
    dead.wait()
    subprocess.run(["ip", "netns", "add", f"tfgradcomp-{dead.pid}-0"], check=True)
    other = f"tfgradcomp-{os.getppid()}-0"
    subprocess.run(["ip", "netns", "add", other], check=True)
    try:
        with cluster.virtual_cluster(1, "1gbit"):
            assert of(dead.pid) == set()
            # That of a run that lives is left alone.
            assert other in namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", other], check=True)


def test_what_cannot_be_made_is_said_and_removed(permitted):
    with pytest.raises(cluster.Unavailable, match="failed: .* needs Linux, root"):
        with cluster.virtual_cluster(2, "1gbit", "never"):
            pass
    assert of(os.getpid()) == set()


@pytest.mark.parametrize("rate", ["1", "1gb", "fast", "0gbit", "-1gbit"])
def test_rates_are_written_as_tc_takes_them(rate):
    with pytest.raises(ValueError, match="write a rate as 1gbit or 100mbit"):
        cluster.bits_per_second(rate)


def test_rates_are_read():
    rates = ["1gbit", "100mbit", "2.5gbit", "8bit"]
    assert [cluster.bits_per_second(r) for r in rates] == [1e9, 1e8, 2.5e9, 8]


@pytest.mark.slow  # `test_exchange` has the same files from one host.
def test_the_files_and_what_they_say(permitted, tmp_path):
    code, output, errors = run(
        "virtual_cluster.py",
        *FEW,
        *("--rate", "200mbit", "--methods", "SignSGD", "--output", tmp_path),
        *("--transports", "all_gather"),
    )
    assert code == 0, errors
    rows = rows_of(tmp_path / "virtual_cluster_200mbit.csv")
    assert len(rows) == 4
    for row in rows.values():
        declared = float(row["declared_bytes_received"])
        assert float(row["wire_ms"]) == pytest.approx(8e3 * declared / 200e6)
        # What is declared has come over the wire, and headers with it.
        for way in ("sent", "received"):
            assert declared < float(row[way]) < 1.25 * declared + 20_000, row
    assert "Links of 200mbit, delay 0ms; a plain TCP connection reached" in output


@pytest.mark.slow  # Training with servers is tested without it.
def test_parameter_servers_are_measured(permitted, tmp_path):
    code, output, errors = run(
        "parameter_server.py",
        *("--units", 200, "--rounds", 20, "--rate", "200mbit", "--output", tmp_path),
        *("--clusters", "2x1"),
    )
    assert code == 0, errors
    with open(tmp_path / "parameter_server_200mbit.csv", newline="") as file:
        rows = {(row["gradients"], row["mode"]): row for row in csv.DictReader(file)}
    methods = "SignSGD", "TernGrad", "DistEFBlockSGDM"
    compressed = itertools.product(methods, ("sync", "async"))
    assert rows.keys() == {*compressed, ("float32", "async")}
    for (gradients, _), row in rows.items():
        assert row["steps"] == "40"
        assert float(row["seconds"]) > 0
        # Of 40,401 elements, 1 to 5 bits each, or 32.
        least, most = (161_604, 200_000) if gradients == "float32" else (5_000, 60_000)
        for way in ("sent", "received"):
            assert least < float(row[way]) < most, row
    assert "links of 200mbit" in output


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_nothing_is_left_after_a_signal(permitted, name, tmp_path):
    process = start("virtual_cluster.py", *FEW, "--output", tmp_path)
    try:
        deadline = time.monotonic() + 60
        # Two launchers with a worker each, in three namespaces.
        while len(children := descendants(process.pid)) < 4:
            assert time.monotonic() < deadline, children
            time.sleep(0.05)
        assert len(of(process.pid)) == 3
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + getattr(signal, name)
    assert alive(children) == []
    assert of(process.pid) == set()
    assert os.listdir(tmp_path) == []
