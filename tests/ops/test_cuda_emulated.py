"""The CUDA kernels, run on a CPU by an emulator, against the CPU's, bit for bit."""

from pathlib import Path

import pytest

from tests.ops.cuda_library import KERNELS, build_checks

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def checks(tmp_path_factory, cpu_library_path):
    flags = "-std=c++17 -O1 -ffp-contract=off -fPIC -Wall -Wextra -Werror"
    # Pragmas that ask nvcc to unroll.
    compiler = ["g++", *flags.split(), "-Wno-unknown-pragmas", "-x", "c++"]
    compiler.append(f"-I{HERE / 'cuda_emulator'}")
    sources = [*KERNELS, HERE / "emulated_cuda.cc"]
    folder = tmp_path_factory.mktemp("emulated")
    return build_checks(folder, cpu_library_path, sources, compiler, ["g++"])


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
    measured, report = checks.measure(1000)
    assert measured, report
    header, *lines = report.splitlines()
    assert header == "device,call,blocks,elements,microseconds,GB/s,of copy"
    assert all(line.startswith("emulator,") for line in lines)
    assert len(lines) > 80
