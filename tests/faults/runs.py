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
    """What came of a run.

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
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFGRADCOMP_STALL_WARNING": str(WARNING),
        "TFGRADCOMP_STALL_TIMEOUT": str(TIMEOUT),
    }
    command = [sys.executable, "-m", "tfgradcomp.launch", "--workers", str(WORKERS)]
    command += ["--max-restarts", "1", "--grace", "2", program.__file__, str(folder)]
    process = subprocess.Popen(
        [*command, signal_name, phase, str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
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
    answers = [
        json.loads((folder / f"answer-{rank}.json").read_text())
        for rank in range(WORKERS)
    ]
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


def _text(lines):
    return "\n".join(line for _, line in lines)
