"""Both implementations of all operations, and calls that compare them."""

import functools
import shutil
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.ops import cases
from tfgradcomp.ops.library import find_library
from tfgradcomp.ops.registry import OPERATIONS

native = SimpleNamespace(**{name: o.native for name, o in OPERATIONS.items()})
reference = SimpleNamespace(**{name: o.reference for name, o in OPERATIONS.items()})

needs_library = pytest.mark.skipif(
    shutil.which("g++") is None and find_library() is None,
    reason="There is no library of native ops and no g++ to build one.",
)
# With these shapes every operation is called in every way.
WHOLE = [(65, "one", 3, "normal"), (6007, "ragged", 3, "normal")]


def on_tensors(ops, name, args, **kwargs):
    """Calls an operation of an implementation on tensors in place of arrays."""
    args = [
        tf.constant(a) if isinstance(a, np.ndarray | np.generic) else a for a in args
    ]
    with np.errstate(all="ignore"):
        return getattr(ops, name)(*args, **kwargs)


@functools.cache
def made(shape):
    """Calls with vectors of a shape: all for `WHOLE`, else every third.

    Of each shape other ones, so that every call meets a dozen shapes. The programs of
    test_sanitizers.py and test_cuda_emulated.py make every call with every shape.
    """
    with np.errstate(all="ignore"):
        calls = cases.calls(*shape)
    if shape in WHOLE:
        return calls
    return calls[zlib.crc32(str(shape).encode()) % 3 :: 3]


@functools.cache
def expected(shape):
    """What the reference gives for each call."""
    return [cases.flat(on_tensors(reference, *call[1:])) for call in made(shape)]


def expected_calls(shape, names=OPERATIONS):
    """Calls of these operations with vectors of a shape, each with its result."""
    results = zip(made(shape), expected(shape), strict=True)
    return [(*call, result) for call, result in results if call[1] in names]
