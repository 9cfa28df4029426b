"""A run without faults, and launchers that end with the test."""

import contextlib
import signal
import subprocess

import pytest

from tests.faults import runs


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run without a fault, which others are compared with."""
    return runs.run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def start_host():
    """Starts the launcher of one host of several, as `runs.start_host`."""
    started = []

    def start(*arguments, **options):
        started.append(runs.start_host(*arguments, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.send_signal(signal.SIGTERM)
    for launcher in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(timeout=60)
        # Its workers end with it.
        launcher.kill()
        launcher.communicate()
