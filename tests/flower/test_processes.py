"""The example as Flower runs it: a SuperLink, two SuperNodes, and their processes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: make flower runs it")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a command of Flower, and ends all at the end."""
    programs = []
    environment = {
        **os.environ,
        # Flower starts its commands by their names.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }

    def start(*command):
        with open(tmp_path / "log", "a") as log:
            program = subprocess.Popen(
                [*map(str, command)],
                cwd=tmp_path,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        programs.append(program)
        return program

    yield start
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def test_the_example_trains_with_superlink_and_supernodes(tmp_path, start):
    link, *ports = free_ports(3)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    offline = "--disable-runtime-dependency-installation"
    start("flower-superlink", "--insecure", "--port", link, offline)
    for number, port in enumerate(ports):
        config = f'partition-id={number} num-partitions=2 state="{number}"'
        start(
            *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}"),
            *("--port", port, "--node-config", config),
        )
    end = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", link)).close()
            break
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.2)
    app = ROOT / "examples/flower"
    start("flwr", "run", app, "here", "--run-config", "rounds=2", "--stream")
    while True:
        text = (tmp_path / "log").read_text()
        if re.search(r"accuracy [\d.]+% after 2 rounds", text):
            break
        assert time.monotonic() < end and "Traceback" not in text, text
        time.sleep(0.5)
    assert "Round 2/2: 2 clients" in text
    for number in range(2):
        assert len([*(tmp_path / str(number)).glob("*/*/state.npz")]) == 2
