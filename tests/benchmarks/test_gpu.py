"""The check of the CUDA kernels, all of it, in the emulator."""

import csv
import subprocess
import sys

import pytest

from tests.ops.cuda_library import REPOSITORY


@pytest.mark.slow
def test_the_whole_check_passes_in_the_emulator(tmp_path):
    command = [sys.executable, "-S", "-m", "benchmarks.gpu", "--emulate"]
    # Its own limit is for a GPU.
    command += ["--output", str(tmp_path), "--minutes", "15"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=940
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.startswith("passed")]
    assert len(passed) == 4 and sum("0 differences" in line for line in passed) == 3
    with open(tmp_path / "gpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 160
    assert {row["device"] for row in rows} == {"emulator"}
    assert all(float(row["microseconds"]) > 0 for row in rows)


def test_without_a_gpu_it_says_so_and_fails(tmp_path):
    # No compiler either: it has to stop there, before anything runs.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path)],
        cwd=REPOSITORY,
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("FAILED: build: ")
    assert not (tmp_path / "gpu.csv").exists()
