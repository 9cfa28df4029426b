"""Tasks that are stopped while they train, and a chief that is killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.parameter_server import fault_worker
from tfgradcomp.collectives.stalls import EXIT_CODE
from tfgradcomp.launch.ports import local_address, reserve_ports

SCRIPT = Path(fault_worker.__file__)
# A worker counts as lost after twice the warning.
WARNING, TIMEOUT = 4, 11

# These tests start separate tasks; `test_membership` and `test_push_rounds` lose and
# readmit workers in one process.
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


class Run(NamedTuple):
    """A chief's exit code, events and output."""

    exit_code: int
    events: list
    output: str

    def end_of(self, training):
        (found,) = self.named("end", training)
        return found

    def named(self, name, training):
        return [
            event
            for event in self.events
            if event["event"] == name and event["training"] == training
        ]

    def between(self, first, second):
        """Seconds between two events of a training."""
        training, name = first
        (start,), (end,) = self.named(name, training), self.named(second, training)
        return end["time"] - start["time"]


def run(folder, *arguments, seconds=300, **environment):
    """Runs a chief, two workers and a server; restarts a chief that is killed."""
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    folder.mkdir(exist_ok=True)
    locks = reserve_ports(len(tasks))
    cluster: dict = {}
    for (job, _), lock in zip(tasks, locks, strict=True):
        cluster.setdefault(job, []).append(local_address(lock))
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFGRADCOMP_STALL_WARNING": str(WARNING),
        **environment,
    }
    output = folder / "output"

    def start(job, index):
        task = {"type": job, "index": index}
        config = json.dumps({"cluster": cluster, "task": task})
        with output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), *arguments],
                env={**base, "TF_CONFIG": config},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    processes = []
    try:
        processes += [start(*task) for task in tasks]
        deadline = time.monotonic() + seconds
        code = processes[0].wait(seconds)
        if code == -signal.SIGKILL:
            processes.append(start("chief", 0))
            code = processes[-1].wait(deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        raise AssertionError(f"hung for {seconds} s:\n{output.read_text()}") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for lock in locks:
            lock.close()
    events = []
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / "events").read_text().splitlines()
        events = [json.loads(line) for line in lines]
    return Run(code, events, output.read_text())


@pytest.fixture(scope="module")
def one_after_another(tmp_path_factory):
    """A chief is killed, a worker is stopped and continued, a server is stopped."""
    return run(
        tmp_path_factory.mktemp("faults"),
        *("sync", "continue", "none", "kill:chief:0", "none", "/"),
        *("none", "none", "none", "/"),
        *("stop:worker:1", "go:worker:1", "none", "/"),
        *("stop:ps:0",),
        TFGRADCOMP_STALL_TIMEOUT=str(TIMEOUT),
    )


def test_a_killed_chief_resumes_with_the_running_workers(
    one_after_another,
):
    resumed, uninterrupted = (one_after_another.end_of(k) for k in (0, 1))
    # The saved epoch is not repeated.
    assert len(one_after_another.named("epoch 0", 0)) == 1
    assert resumed["rounds"] == 3 * fault_worker.STEPS
    # The residuals of workers and servers and the random numbers of dropout continue.
    assert resumed["workers"] == uninterrupted["workers"]
    assert len({*resumed["workers"]}) == 1


def test_a_stopped_worker_is_named_lost_and_readmitted(one_after_another):
    name = r"/job:worker/replica:0/task:1 at \S+ does not answer \(stopped\), for \d+ s"
    assert re.search(name, one_after_another.output)
    assert "task:1; continuing with 1 worker(s)" in one_after_another.output
    assert "back: /job:worker/replica:0/task:1" in one_after_another.output
    seconds = one_after_another.between((2, "stop:worker:1"), "epoch 0")
    assert 2 * WARNING <= seconds < 60
    end = one_after_another.end_of(2)
    assert len(end["workers"]) == 2 and len({*end["workers"]}) == 1
    assert end["rounds"] == 3 * fault_worker.STEPS


def test_a_stopped_server_ends_the_chief(one_after_another):
    assert one_after_another.exit_code == EXIT_CODE
    said = r"the chief ends, because /job:ps/replica:0/task:0 at \S+ has not answered"
    assert re.search(said, one_after_another.output)
    (stopped,) = one_after_another.named("stop:ps:0", 3)
    assert one_after_another.events[-1] == stopped


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        ("async", "stop:worker:1 go:worker:1 none"),
        ("async", "stop:worker:0:save go:worker:0 none"),
        ("sync", "stop:worker:0:save go:worker:0 none"),
        ("sync", "stop:worker:0:trace go:worker:0 none"),
    ],
)
def test_a_stopped_worker_is_readmitted(tmp_path, mode, faults):
    found = run(tmp_path, mode, "continue", *faults.split())
    assert found.exit_code == 0, found.output
    end = found.end_of(0)
    assert len(end["workers"]) == 2 and len({*end["workers"]}) == 1
    assert end["rounds"] == 3 * fault_worker.STEPS
    seconds = found.between((0, faults.split()[0]), "epoch 0")
    print(f"{mode} {faults}: {seconds:.0f} s")
    assert 2 * WARNING <= seconds < 60


def go_on_after(folder, task, seconds):
    """Continues a task some seconds after it was stopped."""
    events = folder / "events"

    def go_on():
        while not (events.exists() and "stop:" in events.read_text()):
            time.sleep(0.1)
        time.sleep(seconds)
        os.kill(int((folder / task).read_text()), signal.SIGCONT)

    threading.Thread(target=go_on, daemon=True).start()


def test_training_waits_for_a_stopped_worker(tmp_path):
    go_on_after(tmp_path, "worker-1", 4 * WARNING)
    found = run(tmp_path, "sync", "wait", "stop:worker:1", "none")
    assert found.exit_code == 0, found.output
    assert "waiting for their restart" in found.output
    end = found.end_of(0)
    assert len(end["workers"]) == 2 and len({*end["workers"]}) == 1
    seconds = found.between((0, "stop:worker:1"), "epoch 0")
    print(f"wait: {seconds:.0f} s")
    assert seconds >= 4 * WARNING


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_continues_with_a_server_that_was_stopped(tmp_path, mode):
    go_on_after(tmp_path, "ps-0", 2 * WARNING)
    # Without a timeout the chief waits, and names the task.
    found = run(tmp_path, mode, "continue", "stop:ps:0", "none")
    assert found.exit_code == 0, found.output
    name = r"/job:ps/replica:0/task:0 at \S+ does not answer \(stopped\)"
    assert re.search(name, found.output)
    assert found.end_of(0)["rounds"] == 2 * fault_worker.STEPS
    seconds = found.between((0, "stop:ps:0"), "epoch 0")
    print(f"server, {mode}: {seconds:.0f} s")
    assert seconds >= 2 * WARNING
