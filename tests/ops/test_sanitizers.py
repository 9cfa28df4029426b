"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

tests/ops/sanitize.cc runs each kernel over all cases of tests/ops/cases.h, in buffers
of exactly the stated size, and compares every instruction set with the portable one.
"""

import concurrent.futures
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "custom_ops" / "cpu"
# Not optimized: compiling takes longer than running.
FLAGS = ["-std=c++17", "-O0", "-g1", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
INSTRUCTIONS = {
    "avx2": ["-mavx2", "-mbmi2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mbmi2"],
}

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="There is no g++ in PATH."
)


def run(*command):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=280
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitize")
    if run("g++", *FLAGS, "-shared", "-x", "c++", "/dev/null", "-o", folder / "a")[0]:
        pytest.skip("This g++ has no sanitizers.")
    jobs = [(HERE / "sanitize.cc", [])]
    for file in KERNELS.glob("*.cc"):
        instructions = INSTRUCTIONS.get(file.stem.rpartition("_")[2], [])
        if not instructions or platform.machine() == "x86_64":
            jobs.append((file, instructions))

    def compile_one(job):
        target = folder / f"{job[0].stem}.o"
        status, output = run("g++", *FLAGS, *job[1], "-c", job[0], "-o", target)
        assert status == 0, output
        return target

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, jobs))
    path = folder / "sanitize"
    status, output = run("g++", *FLAGS, *objects, "-o", path, "-lpthread")
    assert status == 0, output
    return path


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512"])
def test_kernels_stay_inside_their_buffers(program, instruction_set):
    status, output = run(program, instruction_set, 10000)
    if status == 77:
        pytest.skip(f"This machine has no {instruction_set}.")
    assert status == 0, output[-5000:]
    # In one piece, whole and cut, and in 1 to 5: no case was left out.
    assert output.count(" 0 differences") == 7
    counts = [int(line.split(": ")[1].split()[0]) for line in output.splitlines()]
    assert min(counts) > 1500
