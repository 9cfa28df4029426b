"""The CUDA kernels, run on a CPU by an emulator, against the CPU's, bit for bit."""

import pytest

from tests.ops.cuda_library import Checks, build_emulated

# For large vectors as well: several sums a warp, and blocks that all threads look at.
MACROS = ("-DTFGRADCOMP_ENOUGH_WARPS=8", "-DTFGRADCOMP_LARGE_BLOCK=4000")


@pytest.fixture(scope="module")
def checks(tmp_path_factory, cpu_library_path):
    # `tests/benchmarks/test_gpu.py` runs the kernels as they are installed, too.
    folder = tmp_path_factory.mktemp("emulated")
    return Checks(build_emulated(folder, cpu_library_path, MACROS))


@pytest.mark.parametrize(
    ("reverse_order", "thread_blocks", "most"), [(False, 2, 40001), (True, 1, 1000)]
)
def test_emulated_gpu_and_cpu_agree_to_the_bit(
    checks, reverse_order, thread_blocks, most
):
    checks.library.tfgradcomp_emulate(reverse_order, thread_blocks)
    agree, report = checks.verify(most)
    assert agree, report


def test_each_call_can_be_measured(checks):
    measured, report = checks.measure(64)
    assert measured, report
    header, *lines = report.splitlines()
    assert header == "device,call,blocks,elements,microseconds,GB/s,of copy"
    assert all(line.startswith("emulator,") for line in lines)
    assert len(lines) > 80
