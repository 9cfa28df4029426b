"""Messages between processes, without TensorFlow, under sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("mesh.cc")
FLAGS = ["-std=c++17", "-g1", "-O1", "-Wall", "-Werror", "-fno-sanitize-recover=all"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="There is no g++ in PATH.")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_messages_arrive_in_any_order_and_an_end_is_told(sanitizer, tmp_path):
    program, flag = tmp_path / "mesh", f"-fsanitize={sanitizer}"
    command = ["g++", *FLAGS, flag, SOURCE, "-o", program, "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("This g++ has no such sanitizer.")
    assert built.returncode == 0, built.stderr[:3000]
    # The kernel draws addresses from a range too wide for ThreadSanitizer.
    prefix = ["setarch", "-R"] if sanitizer == "thread" else []
    done = subprocess.run(
        [*prefix, program], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
