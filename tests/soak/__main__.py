"""Trains for very long; fails if a process grows, or opens ever more of anything.

python -m tests.soak                              100,000 steps; takes half an hour
python -m tests.soak --steps 2000 --every 1       shorter, printed only

Memory, threads and open files of every process are read from outside, every few
seconds. The first third of a run may grow; what comes after may exceed it by the
ceilings only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import write_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
TITLES = "run", "steps", "steps a second", "process", "memory, MB", "threads", "files"
SCRIPT = str(Path(__file__).with_name("program.py"))
# Options of the launcher, and the script with its arguments.
RUNS = {
    "collectives": (["--workers", "2"], [SCRIPT, "collectives"]),
    "servers, rounds": (["--workers", "2", "--ps", "1"], [SCRIPT, "sync"]),
    "servers, no barrier": (["--workers", "2", "--ps", "1"], [SCRIPT, "async"]),
}
# A process may grow by so many megabytes, threads and files after a third of the run.
CEILINGS = (20.0, 2, 4)


class Sample(NamedTuple):
    """Resident megabytes, threads and open files of a process."""

    memory: float
    threads: int
    files: int


def main() -> int:
    """Prints a line for each process; returns the number of those that grew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds")
    arguments = parser.parse_args()
    lines, failures = [f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES)], 0
    for name, (options, ways) in RUNS.items():
        began = time.monotonic()
        samples = _watch([*options, *ways, str(arguments.steps)], arguments.every)
        rate = arguments.steps / (time.monotonic() - began)
        for process, seen in samples.items():
            cells, has_grown = _judge(seen)
            failures += has_grown
            cells = [name, f"{arguments.steps:,}", f"{rate:.0f}", process, *cells]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if not failures and arguments.steps >= 100_000:
        write_table(PAGE, "soak", lines)
    return failures


def _watch(arguments, every):
    """Runs the launcher; returns the samples of each process by its place in it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tfgradcomp.launch", *arguments],
        env=environment,
        start_new_session=True,
    )
    samples: dict[str, list[Sample]] = {}
    try:
        while launcher.poll() is None:
            time.sleep(every)
            for pid in _children(launcher.pid):
                if name := _name_of(pid):
                    samples.setdefault(name, []).append(_sample(pid))
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=30)
    if launcher.returncode:
        raise RuntimeError(f"The run has failed: exit code {launcher.returncode}")
    return {name: [one for one in seen if one] for name, seen in samples.items()}


def _children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _name_of(pid):
    """The role and the index of a process of the cluster, from its environment."""
    try:
        text = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return None
    found = [v for v in text.split("\0") if v.startswith("TF_CONFIG=")]
    if not found:
        return None
    task = json.loads(found[0].partition("=")[2])["task"]
    return f"{task['type']} {task['index']}"


def _sample(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None
    memory = int(fields["VmRSS"].split()[0]) / 1024
    return Sample(memory, int(fields["Threads"]), files)


def _judge(seen):
    """The cells of a process, "most early → most late", and whether it has grown."""
    third = max(len(seen) // 3, 1)
    early, late = (
        [max(column) for column in zip(*part, strict=True)]
        for part in (seen[:third], seen[third:] or seen)
    )
    cells = [f"{a:.0f} → {b:.0f}" for a, b in zip(early, late, strict=True)]
    growth = zip(early, late, CEILINGS, strict=True)
    return cells, any(b > a + ceiling for a, b, ceiling in growth)


if __name__ == "__main__":
    sys.exit(main())
