"""The bytes that cross the network in a step."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import run_workers

SCRIPT = Path(__file__).parent / "traffic_worker.py"
WORKERS = 2
NETWORK = Path(__file__).parent / "own_network.py"
IN_A_NETWORK = ["unshare", "--net", "--map-root-user", sys.executable, str(NETWORK)]


@pytest.mark.slow
def test_only_declared_words_cross_the_network(tmp_path):
    done = subprocess.run([*IN_A_NETWORK, "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no network of one's own here: {done.stderr}")
    (seen,), _ = run_workers(SCRIPT, WORKERS, tmp_path, servers=1, prefix=IN_A_NETWORK)
    declared = WORKERS * (seen["declared_up"] + seen["declared_down"])
    # In addition there are headers, and the chief's calls that start steps.
    assert declared <= seen["sync"] <= 1.1 * declared + 60_000
    float32 = 4 * seen["elements"]
    # Weights down, gradients up, on each worker.
    assert WORKERS * 2 * float32 >= 10 * max(seen["sync"], seen["async"])
    assert 10 * seen["declared_up"] <= float32
    assert 10 * seen["declared_down"] <= float32
