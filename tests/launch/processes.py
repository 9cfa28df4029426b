"""The launcher as a process, as users run it, and its workers."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

LAUNCH = [sys.executable, "-m", "tfgradcomp.launch"]
TIMEOUT = 60
OURS = re.compile("TF_|SLURM_|OMP_|TFGRADCOMP_|PYTHONUNBUFFERED")
SLEEPER = "import os, time\nprint('pid', os.getpid())\ntime.sleep(600)"


def clean_env(**extra):
    env = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    return {**env, **extra}


def run(*args, env=None, stdout=subprocess.PIPE):
    return subprocess.run(
        [*LAUNCH, *args],
        env=clean_env(**(env or {})),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
    )


def pids_in(text):
    return [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def pids(process, count):
    """Read output until `count` processes have printed their ids."""
    while len(process.pids) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        process.pids += pids_in(line)
    return process.pids


def alive(pid):
    """Return whether a process still runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids):
    deadline = time.monotonic() + TIMEOUT
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on this machine")
