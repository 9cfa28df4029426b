"""The CPU kernels under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer.

tests/ops/sanitize.cc runs each kernel over all cases of tests/ops/cases.h, in buffers
of exactly the stated size, and compares every instruction set with the portable one.
tests/ops/fuzz.cc hands arbitrary words to all that decode them.
"""

import concurrent.futures
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.kept import kept_folder
from tfgradcomp.ops.build import INSTRUCTIONS

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "custom_ops" / "cpu"
FLAGS = ["-std=c++17", "-g1", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-fno-sanitize-recover=all"]
# Not optimized where compiling takes longer than running.
BOUNDS = ["-O0", "-fsanitize=address,undefined"]
BOUNDS_FAST = ["-O1", "-fsanitize=address,undefined"]
RACES = ["-O1", "-fsanitize=thread"]

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="There is no g++ in PATH."
)


def run(*command, timeout=280):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout + done.stderr


def compiled(source, flags):
    """The program of `source` and the kernels, compiled with these flags."""
    flags = [*FLAGS, *flags]
    sets = [str(item) for item in INSTRUCTIONS.items()]
    folder = kept_folder("sanitized", [*flags, *sets], lambda f: compile_all(f, flags))
    return folder / Path(source).stem


def compile_all(folder, flags):
    """Builds both programs."""
    if run("g++", *flags, "-shared", "-x", "c++", "/dev/null", "-o", folder / "a")[0]:
        pytest.skip("This g++ has no such sanitizer.")
    programs = [HERE / "sanitize.cc", HERE / "fuzz.cc"]
    jobs = [(source, []) for source in programs]
    for file in KERNELS.glob("*.cc"):
        instructions = INSTRUCTIONS.get(file.stem.rpartition("_")[2], [])
        if not instructions or platform.machine() == "x86_64":
            jobs.append((file, instructions))

    def compile_one(job):
        target = folder / f"{job[0].stem}.o"
        status, output = run("g++", *flags, *job[1], "-c", job[0], "-o", target)
        assert status == 0, output
        return target

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, jobs))
    for source, own in zip(programs, objects, strict=False):
        command = ["g++", *flags, own, *objects[len(programs) :], "-lpthread"]
        status, output = run(*command, "-o", folder / source.stem)
        assert status == 0, output


def fuzz(program, instruction_set, messages, timeout):
    """Runs the fuzzer; returns the numbers of messages and of faults by decoder."""
    command = (program, instruction_set, messages, 7)
    status, output = run(*command, timeout=timeout)
    if status == 77:
        pytest.skip(f"This machine has no {instruction_set}.")
    assert status == 0, output[-5000:]
    lines = [line.replace(",", "").split() for line in output.splitlines()]
    return {line[1].rstrip(":"): (int(line[2]), int(line[4])) for line in lines}


SETS = pytest.mark.parametrize(
    "instruction_set",
    # Each is compared with the portable one, whose loops run so as well.
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("portable", "avx2")),
        "avx512",
    ],
)


@pytest.mark.slow
@SETS
def test_kernels_stay_inside_their_buffers(instruction_set):
    program = compiled("sanitize.cc", BOUNDS)
    status, output = run(program, instruction_set, 10000, "pieces")
    if status == 77:
        pytest.skip(f"This machine has no {instruction_set}.")
    assert status == 0, output[-5000:]
    # In one piece, whole and cut, and in 1 to 5: no case was left out.
    assert output.count(" 0 differences") == 7
    counts = [int(line.split(": ")[1].split()[0]) for line in output.splitlines()]
    assert min(counts) > 1500


@SETS
def test_arbitrary_words_are_a_number_and_the_same_one(instruction_set):
    results = fuzz(compiled("fuzz.cc", BOUNDS), instruction_set, 2000, 280)
    assert len(results) == 9
    assert all(count >= 2000 and not faults for count, faults in results.values())


@pytest.mark.slow
@pytest.mark.timeout(3000)
@SETS
def test_a_million_arbitrary_messages(instruction_set):
    program = compiled("fuzz.cc", BOUNDS_FAST)
    results = fuzz(program, instruction_set, 10**6, 2800)
    assert len(results) == 9
    assert all(count >= 10**6 and not faults for count, faults in results.values())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@SETS
def test_threads_share_nothing_that_they_write(instruction_set):
    program = compiled("sanitize.cc", RACES)
    command = (program, instruction_set, 3000, "threads")
    status, output = run(*command, timeout=1000)
    if "unexpected memory mapping" in output:
        # The kernel draws addresses from a range too wide for this sanitizer.
        status, output = run("setarch", "-R", *command, timeout=1000)
    if status == 77:
        pytest.skip(f"This machine has no {instruction_set}.")
    assert status == 0, output[-5000:]
    assert output.count(" 0 differences") == 2
