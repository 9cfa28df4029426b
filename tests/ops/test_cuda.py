"""The CUDA kernels: that they compile and, on a GPU, equal the CPU's bit for bit.

On a machine with a GPU this also prints how fast they are (`pytest -s`).
"""

import pytest

from tests.ops.cuda_library import Checks, build_with_nvcc, load_build

MEASURED_ELEMENTS = 1 << 24


# CI compiles the same sources into the library, and `test_cuda_emulated` runs them.
pytestmark = pytest.mark.slow

# As PTX, which the driver of any GPU since Turing compiles; and to the end, for Hopper.
# What is installed is compiled for more (tfgradcomp/ops/build.py).
TARGETS = [
    pytest.param("-gencode=arch=compute_75,code=compute_75", id="ptx"),
    pytest.param("-gencode=arch=compute_90,code=sm_90", id="hopper"),
]


@pytest.fixture(scope="module", params=TARGETS)
def checks(request, tmp_path_factory):
    """The library, compiled without a warning."""
    build = load_build()
    nvcc, reason = build.find_nvcc(for_others=True)
    if nvcc is None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cuda")
    # The library of the operations has CUDA kernels of its own.
    cpu = build.build_cpu_library(folder / "libcpu.so")
    # The level is the host's: a GPU's code is always optimized.
    flags = "-std=c++17 -O1 -fmad=false -Xcompiler -fPIC,-Wall,-Wextra".split()
    flags += ["-Werror", "all-warnings", request.param]
    return Checks(build_with_nvcc(folder, cpu, nvcc, flags)[0])


@pytest.fixture(scope="module")
def checks_on_gpu(checks):
    if checks.gpu_count() == 0:
        pytest.skip("no GPU: cudaGetDeviceCount finds none")
    return checks


def test_compiles_without_warnings_and_loads_without_a_gpu(checks):
    assert checks.gpu_count() >= 0


def test_without_a_gpu_the_error_is_cudas(checks):
    if checks.gpu_count() > 0:
        pytest.skip("there is a GPU")
    agree, report = checks.verify(10)
    assert not agree
    assert "CUDA" in report


def test_gpu_and_cpu_agree_to_the_bit(checks_on_gpu):
    agree, report = checks_on_gpu.verify(1 << 21)
    assert agree, report


def test_speed(checks_on_gpu):
    measured, report = checks_on_gpu.measure(MEASURED_ELEMENTS)
    print(f"\n{report}")
    assert measured, report
