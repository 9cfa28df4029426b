"""The CUDA kernels, run on a CPU by an emulator, against the CPU's, bit for bit."""

import pytest

from tests.ops.cuda_library import EMULATED_FLAGS, Checks, build_emulated
from tests.ops.kept import kept_folder
from tfgradcomp.ops.library import library as native_library

# For large vectors as well: several sums a warp, and blocks that all threads look at.
MACROS = ("-DTFGRADCOMP_ENOUGH_WARPS=8", "-DTFGRADCOMP_LARGE_BLOCK=4000")


@pytest.fixture(scope="module")
def checks():
    # `tests/benchmarks/test_gpu.py` runs the kernels as they are installed, too. Those
    # of the CPU are in the library of the operations.
    cpu = native_library().path
    facts = [*EMULATED_FLAGS, *MACROS, str(cpu)]
    folder = kept_folder("emulated", facts, lambda f: build_emulated(f, cpu, MACROS))
    return Checks(folder / "libchecks.so")


# What is forgotten in one order of threads shows in the other one, and few shapes run
# every line.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reverse_order", "thread_blocks", "most", "few"),
    [(False, 2, 40001, False), (True, 1, 40001, True), (True, 1, 1000, False)],
)
def test_emulated_gpu_and_cpu_agree_to_the_bit(
    checks, reverse_order, thread_blocks, most, few
):
    checks.library.tfgradcomp_emulate(reverse_order, thread_blocks)
    agree, report = checks.verify(most, few)
    assert agree, report


@pytest.mark.slow
def test_each_call_can_be_measured(checks):
    measured, report = checks.measure(64)
    assert measured, report
    header, *lines = report.splitlines()
    assert header == "device,call,blocks,elements,microseconds,GB/s,of copy"
    assert all(line.startswith("emulator,") for line in lines)
    assert len(lines) > 80
