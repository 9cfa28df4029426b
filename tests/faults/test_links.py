"""Links between hosts that lose packets, or carry none for a while: as root only."""

import re
import subprocess
import time

import pytest

from tests.benchmarks.scripts import import_script
from tests.faults import program, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

cluster = import_script("cluster")


@pytest.fixture
def hosts():
    """Two hosts with links of their own."""
    try:
        with cluster.virtual_cluster(2, "100mbit") as hosts:
            yield hosts
    except cluster.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def launchers(hosts, start_host, tmp_path):
    """Starts a training of half a second a step."""
    addresses = [f"{host.address}:4000" for host in hosts]
    slow = ("none", "slow", "1")
    return lambda: [
        start_host(addresses, index, tmp_path, slow, host.command())
        for index, host in enumerate(hosts)
    ]


def tc(host, *arguments):
    command = ["tc", "-n", host.namespace, *arguments]
    done = subprocess.run(
        command, check=True, timeout=20, capture_output=True, text=True
    )
    return done.stdout


def test_lost_packets_cost_time_alone(hosts, launchers, whole, tmp_path):
    for host in hosts:
        # What does not fit into the queue is dropped.
        shape = ("tbf", "rate", "5mbit", "burst", "4000", "limit", "8000")
        tc(host, "qdisc", "change", "dev", "eth0", "root", "handle", "1:", *shape)
    answers, output = runs.finish_hosts(launchers(), tmp_path)
    runs.check_bits(answers, whole)
    assert "restart" not in output
    for host in hosts:
        said = tc(host, "-s", "qdisc", "show", "dev", "eth0")
        assert int(re.search(r"dropped (\d+)", said)[1]) > 10


def test_hosts_meet_again_when_a_link_is_back(hosts, launchers, whole, tmp_path):
    started = launchers()
    runs.wait_for_next_backup(tmp_path)
    link = ("ip", "-n", hosts[1].namespace, "link", "set", "eth0")
    subprocess.run([*link, "down"], check=True, timeout=20)
    time.sleep(30)
    subprocess.run([*link, "up"], check=True, timeout=20)
    answers, output = runs.finish_hosts(started, tmp_path)
    runs.check_bits(answers, whole)
    assert output.count("restart 1 of 3") == 2
    for rank in range(2):
        assert answers[rank]["epochs"][-1] == program.EPOCHS - 1
        assert answers[rank]["epochs"][0] > 0
        assert f"worker {rank} does not answer" in output
