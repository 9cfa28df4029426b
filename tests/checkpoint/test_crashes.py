"""A backup whose writing fails at each of its system calls in turn."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import crash_cases

SOURCE = Path(__file__).with_name("faults.c")


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """A list for each attempt: fault, number of the call, end, epochs left."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("faults")
    library = folder / "faults.so"
    compile_ = ["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(compile_, check=True, timeout=60)
    preload = {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, crash_cases.__file__, library, folder],
        env={**os.environ, **preload},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", crash_cases.FAULTS)
def test_the_last_good_backup_survives_a_fault_at_each_call(fault, ends):
    calls = [(end, epochs) for name, _, end, epochs in ends if name == fault]
    # Only calls that write data can be torn.
    assert len(calls) > (10 if fault == "torn" else 20)
    for end, epochs in calls:
        if fault in ("killed", "torn"):
            assert (end, epochs) in (("killed", [1, 2]), ("killed", [1, 2, 3])), epochs
        else:
            # Epoch 4 is written after the error; the newest two are kept.
            assert end == "raised"
            assert epochs in ([2, 4], [3, 4])
