"""Links between hosts that lose and delay packets, or carry none: as root only."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.benchmarks.scripts import import_script
from tests.faults import program, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

cluster = import_script("cluster")


@pytest.fixture
def hosts():
    """Two hosts whose packets take a tenth of a second, so that steps take a while."""
    try:
        with cluster.virtual_cluster(2, "100mbit", delay="50ms") as hosts:
            yield hosts
    except cluster.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("whole"))


def start(hosts, folder):
    """Starts a launcher on each host."""
    addresses = ",".join(f"{host.address}:4000" for host in hosts)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFGRADCOMP_STALL_WARNING": str(runs.WARNING),
        "TFGRADCOMP_STALL_TIMEOUT": str(runs.TIMEOUT),
    }
    return [
        subprocess.Popen(
            host.command(
                *(sys.executable, "-m", "tfgradcomp.launch", "--cluster", addresses),
                *("--index", str(index), "--max-restarts", "1", "--grace", "2"),
                *(program.__file__, str(folder), "none", "exchange", "1"),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for index, host in enumerate(hosts)
    ]


def finish(launchers, folder):
    """Waits for the launchers; returns the answers and the output."""
    try:
        output = "".join(one.communicate(timeout=300)[0] for one in launchers)
    finally:
        for one in launchers:
            one.send_signal(signal.SIGTERM)
            one.wait(timeout=30)
    assert [one.returncode for one in launchers] == [0, 0], output
    paths = [folder / f"answer-{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) for path in paths], output


def check(answers, whole):
    for answer, expected in zip(answers, whole.answers, strict=True):
        assert answer["digest"] == expected["digest"]
        assert answer["residuals"] == expected["residuals"]


def test_lost_packets_cost_time_alone(hosts, whole, tmp_path):
    for host in hosts:
        shape = ("netem", "delay", "50ms", "20ms", "loss", "2%")
        where = ("dev", "eth0", "parent", "1:1")
        command = ("tc", "-n", host.namespace, "qdisc", "change", *where, *shape)
        subprocess.run(command, check=True, timeout=20)
    answers, output = finish(start(hosts, tmp_path), tmp_path)
    check(answers, whole)
    assert "restart" not in output


def test_hosts_meet_again_when_a_link_is_back(hosts, whole, tmp_path):
    launchers = start(hosts, tmp_path)
    backups = [tmp_path / f"backup/worker-{rank}/epoch-000001" for rank in range(2)]
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in backups) and time.monotonic() < deadline:
        time.sleep(0.05)
    link = ("ip", "-n", hosts[1].namespace, "link", "set", "eth0")
    subprocess.run([*link, "down"], check=True, timeout=20)
    time.sleep(30)
    subprocess.run([*link, "up"], check=True, timeout=20)
    answers, output = finish(launchers, tmp_path)
    check(answers, whole)
    assert output.count("restart 1 of 1") == 2
    for rank in range(2):
        assert answers[rank]["epochs"][-1] == program.EPOCHS - 1
        assert answers[rank]["epochs"][0] > 0
        assert f"worker {rank} does not answer" in output
