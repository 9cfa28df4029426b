"""Runs the benchmarks' scripts, and imports their modules as they do."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def import_script(name):
    """A module of the benchmarks' folder."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def start(script, *arguments):
    """Starts a script; its output comes by pipes."""
    ours = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, str(FOLDER / script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(script, *arguments, timeout=240):
    """Runs a script to its end; returns exit code, output and errors."""
    process = start(script, *arguments)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        # Its own children end with it.
        process.kill()
    return process.returncode, output, errors


def rows_of(path):
    """The rows of a CSV, by variant and transport."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["variant"], row["transport"]): row for row in rows}


def alive(pids):
    """Those processes that have not ended."""
    return [pid for pid in pids if _state(pid) not in (None, "Z")]


def descendants(pid):
    """The processes that a process started, and those that they started."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in parents.get(parent, [])]
        found += new
    return found


def _state(pid):
    fields = _stat(pid)
    return fields and fields[0]


def _stat(pid):
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
