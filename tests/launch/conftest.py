"""Fixtures that write a worker's script and start a launcher."""

import contextlib
import os
import signal
import subprocess
import textwrap

import pytest

from tests.launch.processes import LAUNCH, clean_env


@pytest.fixture
def script(tmp_path):
    """Write a worker script, which may use CONFIG, INDEX and ATTEMPT."""

    def write(body, name="worker.py"):
        head = """\
            import json, os, signal, subprocess, sys, time
            CONFIG = json.loads(os.environ.get("TF_CONFIG") or "{}")
            INDEX = CONFIG.get("task", {}).get("index")
            ATTEMPT = os.environ.get("TFGRADCOMP_RESTART_COUNT")
        """
        path = tmp_path / name
        path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def launch():
    """Start a launcher; the processes in `launcher.pids` are killed at the end."""
    started = []
    # The launcher ignores SIGHUP under nohup, and the tests may run under nohup.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def start(*args, env=None, **options):
        process = subprocess.Popen(
            [*LAUNCH, *args],
            env=clean_env(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        process.pids = []
        started.append(process)
        return process

    yield start
    signal.signal(signal.SIGHUP, hangup)
    for process in started:
        if process.poll() is None:
            # Its workers end too: see test_workers_do_not_outlive_...
            process.kill()
        process.communicate()
        for pid in process.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
