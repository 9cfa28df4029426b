"""Runs the program with a fault; says what happened, and after how many seconds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults import program

# Short, so that a run takes seconds; by default a line comes after a minute.
WARNING, TIMEOUT = 2, 6
WORKERS = 2


class Run(NamedTuple):
    """The results of a run.

    Attributes:
        answers: Of each worker.
        said: The first line that names the worker, and the seconds from the fault on.
        seconds: From the fault to the end of the run.
        attempts: How often the workers were started.
        output: All that was printed.
    """

    answers: list
    said: tuple[str, float]
    seconds: float
    attempts: int
    output: str


def run(folder: Path, signal_name="none", phase="exchange", rank=1, timeout=240) -> Run:
    """Trains on two workers, one of which a signal strikes.

    Raises:
        AssertionError: If the run fails or takes too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tfgradcomp.launch", "--workers", str(WORKERS)]
    command += ["--max-restarts", "1", "--grace", "2", program.__file__, str(folder)]
    process = subprocess.Popen(
        [*command, signal_name, phase, str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    lines = []
    try:
        deadline = time.monotonic() + timeout
        for line in process.stdout:
            lines.append((time.time(), line.rstrip()))
            assert time.monotonic() < deadline, f"still running:\n{_text(lines)}"
        code = process.wait(timeout=30)
    finally:
        # The launcher ends its workers.
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    assert code == 0, f"exit code {code}:\n{_text(lines)}"
    answers = _answers(folder)
    moment = folder / "moment"
    struck = float(moment.read_text()) if moment.exists() else lines[-1][0]
    how = r"\(pid \d+\) died|does not answer|has not arrived"
    names = re.compile(rf"worker {rank} ({how})")
    said = [(line, at - struck) for at, line in lines if names.search(line)]
    return Run(
        answers,
        said[0] if said else ("", 0.0),
        max(answer["ended"] for answer in answers) - struck,
        1 + sum("restart 1 of 1" in line for _, line in lines),
        _text(lines),
    )


def start_host(addresses, index, folder, arguments=("none", "logs", "1"), prefix=()):
    """Starts the launcher of one host of several."""
    command = [*prefix, sys.executable, "-m", "tfgradcomp.launch"]
    command += ["--cluster", ",".join(addresses), "--index", str(index)]
    command += ["--max-restarts", "3", "--grace", "20", program.__file__, str(folder)]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
        start_new_session=True,
    )


def finish_hosts(launchers, folder):
    """Waits for the launchers of all hosts; returns the answers and the output."""
    output = "".join(one.communicate(timeout=300)[0] for one in launchers)
    assert [one.returncode for one in launchers] == [0] * len(launchers), output
    return _answers(folder), output


def wait_for_next_backup(folder):
    """Waits until all workers have the backup of an epoch that none has yet."""
    known = [path.name for path in folder.glob("backup/worker-*/epoch-*")]
    epoch = 1 + max([int(name[6:12]) for name in known], default=0)
    name = f"epoch-{epoch:06d}"
    paths = [folder / f"backup/worker-{rank}/{name}" for rank in range(WORKERS)]
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no backup of epoch {epoch}"
        time.sleep(0.05)


def check_bits(answers, whole):
    """Compares the workers' weights and residuals with those of another run."""
    for answer, expected in zip(answers, whole.answers, strict=True):
        assert answer["digest"] == expected["digest"]
        assert answer["residuals"] == expected["residuals"]


def _environment():
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFGRADCOMP_STALL_WARNING": str(WARNING),
        "TFGRADCOMP_STALL_TIMEOUT": str(TIMEOUT),
    }


def _answers(folder):
    paths = [folder / f"answer-{rank}.json" for rank in range(WORKERS)]
    return [json.loads(path.read_text()) for path in paths]


def _text(lines):
    return "\n".join(line for _, line in lines)
