"""What several files compile once."""

import shutil

import pytest

from tfgradcomp.ops import build


@pytest.fixture(scope="session")
def cpu_library_path(tmp_path_factory):
    """The library of the CPU kernels alone, without TensorFlow."""
    if shutil.which("g++") is None:
        pytest.skip("There is no g++.")
    return build.build_cpu_library(tmp_path_factory.mktemp("cpu") / "libcpu.so")
