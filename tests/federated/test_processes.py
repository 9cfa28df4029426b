"""A hub and clients as processes that are killed, over localhost."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster import light_environment

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 30
SECONDS = 120


class Program:
    """A command of the package, and the lines that it writes."""

    def __init__(self, name, *arguments):
        code = f"import sys; from tfgradcomp.federated.commands import {name} as run; "
        command = [sys.executable, "-c", code + "sys.exit(run())", *map(str, arguments)]
        self.process = subprocess.Popen(
            [*command, "--insecure"],
            cwd=ROOT,
            env=light_environment(TF_CPP_MIN_LOG_LEVEL="3"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen, self._lines = [], queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern):
        """Returns the first match among the lines that have not been seen."""
        end = time.monotonic() + SECONDS
        while (line := self._lines.get(timeout=end - time.monotonic())) is not None:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} never came:\n{''.join(self.seen)}")

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)

    def end(self):
        if self.process.poll() is None:
            self.kill()


@pytest.fixture
def start():
    programs = []

    def start(*arguments):
        programs.append(Program(*arguments))
        return programs[-1]

    yield start
    for program in programs:
        program.end()


@pytest.mark.slow
def test_killed_clients_and_hubs_return_and_all_end_with_the_same_weights(
    start, tmp_path
):
    model = "tests.federated.programs:make_model"

    def start_hub(address):
        options = "--rounds", ROUNDS, "--deadline", 20, "--quorum", 2
        folder = "--state", tmp_path / "hub", "--log-dir", tmp_path / "figures"
        return start("hub", model, "--address", address, *options, *folder)

    def start_client(name):
        data = "tests.federated.programs:dataset"
        folder = "--state", tmp_path / name, "--prometheus-port", 0
        return start("join", address, model, data, "--every", 4, *folder)

    hub = start_hub("127.0.0.1:0")
    address = hub.wait_for(r" at (127\.0\.0\.1:\d+), after round 0/30")[1]
    lima, oslo = start_client("lima"), start_client("oslo")
    hub.wait_for("Round 5/30: 2 clients")
    lima.kill()
    lima = start_client("lima")
    hub.wait_for(r"Round 1\d/30: 2 clients")
    hub.kill()
    hub = start_hub(address)
    closed = int(hub.wait_for(r"after round (\d+)/30")[1])
    assert closed >= 10
    ends = [
        program.wait_for("ended after round 30 with the weights (.*)")[1]
        for program in (hub, lima, oslo)
    ]
    assert len({*ends}) == 1, ends
    # Each of the two runs of the hub has written figures.
    assert len([*(tmp_path / "figures").iterdir()]) == 2
    assert [p.process.wait(SECONDS) for p in (hub, lima, oslo)] == [0, 0, 0]
    # Each round after the restart is closed once.
    rounds = re.findall(r"Round (\d+)/30", "".join(hub.seen))
    assert [*map(int, rounds)] == [*range(closed + 1, ROUNDS + 1)]
