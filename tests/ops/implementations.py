"""Both implementations of all operations, by the names of the operations."""

import shutil
from types import SimpleNamespace

import pytest

from tfgradcomp.ops.library import find_library
from tfgradcomp.ops.registry import OPERATIONS

native = SimpleNamespace(**{name: o.native for name, o in OPERATIONS.items()})
reference = SimpleNamespace(**{name: o.reference for name, o in OPERATIONS.items()})

needs_library = pytest.mark.skipif(
    shutil.which("g++") is None and find_library() is None,
    reason="There is no library of native ops and no g++ to build one.",
)
