"""What several files compile once."""

import pytest

from tests.ops.cpu_library import CpuLibrary
from tests.ops.implementations import native, needs_library, reference
from tfgradcomp.ops import library as ops_library
from tfgradcomp.ops.library import build_library, find_library


@pytest.fixture(
    params=[pytest.param(native, marks=needs_library), reference],
    ids=["native", "python"],
)
def ops(request):
    """Each implementation of the operations."""
    return request.param


@pytest.fixture(params=["portable", "avx2", "avx512"])
def kernels(request, library):
    """The CPU kernels with each instruction set of this machine."""
    best = library.instruction_set()
    if not library.set_instruction_set(request.param):
        pytest.skip(f"This machine has no {request.param}.")
    assert library.instruction_set() == request.param
    yield library
    library.offset = 4
    assert library.set_instruction_set(best)


@pytest.fixture(scope="session")
def library():
    """The CPU kernels as they are in the library of the operations."""
    # TensorFlow finds no operations in a library that something else has loaded first.
    ops_library.library()
    return CpuLibrary(find_library() or build_library())
