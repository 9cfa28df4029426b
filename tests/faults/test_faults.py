"""Workers that die or stop in any phase of a training that starts again."""

import signal

import pytest

from tests.faults import program, runs
from tfgradcomp.callbacks import backup
from tfgradcomp.launch.ports import local_address, reserve_ports

SIGNALS = ("SIGKILL", "SIGSTOP")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check(run, whole, phase):
    """The worker was named, and what came of the second attempt is the same."""
    assert run.attempts == 2, run.output
    assert run.said[0], run.output
    runs.check_bits(run.answers, whole)
    first = 0 if phase == "trace" else program.EPOCH
    for answer in run.answers:
        assert answer["epochs"] == [*range(first, program.EPOCHS)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", program.PHASES)
@pytest.mark.parametrize("name", SIGNALS)
def test_training_goes_on_after_a_restart(name, phase, rank, whole, tmp_path):
    check(runs.run(tmp_path, name, phase, rank), whole, phase)


def test_hosts_are_taken_away_one_after_the_other(whole, start_host, tmp_path):
    # Held until the launchers end.
    locks = reserve_ports(2)
    addresses = [local_address(lock) for lock in locks]
    # Long enough to be met in the middle.
    arguments = ("none", "slow", "1")
    hosts = [start_host(addresses, i, tmp_path, arguments) for i in range(2)]
    for index in (1, 0):
        runs.wait_for_next_backup(tmp_path)
        hosts[index].send_signal(signal.SIGTERM)
        output, _ = hosts[index].communicate(timeout=60)
        assert hosts[index].returncode == backup.PREEMPTED, output
        # The others have saved as well, and wait for it.
        hosts[index] = start_host(addresses, index, tmp_path, arguments)
    answers, output = runs.finish_hosts(hosts, tmp_path)
    runs.check_bits(answers, whole)
    # By launcher 1, which had joined the second attempt of launcher 0.
    assert "restart 2 of 3" in output
    for lock in locks:
        lock.close()
