"""Choice between the native operations and pure TensorFlow, at every call."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgradcomp.compat.xla import in_xla
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops import library, native, reference

_BUILD = "python -m tfgradcomp.ops --build"
_MODES = ("auto", "native", "python")

_warned: set[str] = set()
_warned_lock = threading.Lock()


def _choosing(name: str, op: str | None = None, size: int | None = None) -> Callable:
    """Returns the function `name`, whose native operation is `op` or has its name.

    Args:
        name: Name of the function.
        op: Name of the native operation.
        size: Place of an argument that the native operation must know when a graph is
            made: how much it writes, by the number of elements or the ends of blocks,
            or a threshold. Where that is a tensor, the reference is taken.
    """
    in_python, in_native = getattr(reference, name), getattr(native, name)

    @functools.wraps(in_python)
    def operation(*args, **kwargs):
        varies = size is not None and any(map(tf.is_tensor, args[size : size + 1]))
        chosen = in_native if not varies and _takes_native(op or name) else in_python
        return chosen(*args, **kwargs)

    return operation


def _takes_native(name: str) -> bool:
    mode = os.environ.get("TFGRADCOMP_OPS", "auto")
    if mode not in _MODES:
        raise ValueError(
            f"The environment variable TFGRADCOMP_OPS must be one of {_MODES}. "
            f"Received: TFGRADCOMP_OPS={mode!r}"
        )
    if mode == "python" or in_xla():
        return False
    obstacle = _obstacle(name, on_gpu=mode == "auto" and library.gpu_is_visible())
    if obstacle is None:
        return True
    if mode == "native":
        raise library.UnavailableError(
            f"TFGRADCOMP_OPS=native, but {obstacle}. Or set TFGRADCOMP_OPS=python to "
            "run in pure TensorFlow"
        )
    _warn_once(
        f"tfgradcomp falls back to pure TensorFlow, which is slower: {obstacle}. "
        "TFGRADCOMP_OPS=python says so on purpose, without this warning"
    )
    return False


def _obstacle(name: str, on_gpu: bool) -> str | None:
    """Returns why an operation cannot run natively and what to do, None if it can."""
    try:
        loaded = library.library()
    except library.UnavailableError as error:
        return (
            f"the native ops could not be built or loaded: {error}\nWith a C++ "
            f"compiler installed (g++, or the one that CXX names), run `{_BUILD}`"
        )
    problem = library.gpu_problem(loaded) if on_gpu else None
    if problem is not None and not _is_for_cpu():
        return (
            f"TensorFlow sees GPUs, but of {loaded.path}: {problem}. With the nvcc of "
            f"a CUDA that the GPUs' driver supports, run `{_BUILD}`. What is placed on "
            "a CPU runs natively all the same"
        )
    if not loaded.has(name):
        return f"{loaded.path} has no {name}. Run `{_BUILD}`"
    return None


def _is_for_cpu() -> bool:
    """Returns whether what is made here is placed on a CPU, GPUs or not."""
    if tf.executing_eagerly():
        device = tf.constant(0.0).device
    else:
        # Nothing needs it, so no function runs it.
        device = tf.no_op().device
    return tf.DeviceSpec.from_string(device).device_type == "CPU"


def _warn_once(message: str) -> None:
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)


pack_codes = _choosing("pack_codes")
unpack_codes = _choosing("unpack_codes", size=2)
pack_signs = _choosing("pack_signs")
pack_signs_checked = _choosing("pack_signs_checked", "pack_signs")
pack_momentum_signs = _choosing("pack_momentum_signs")
pack_ternary = _choosing("pack_ternary")
block_statistics = _choosing("block_statistics")
sum_codes = _choosing("sum_codes", size=2)
sum_levels = _choosing("sum_levels", size=2)
mean_of_signs = _choosing("mean_of_signs", size=2)
find_levels = _choosing("find_levels")
pack_levels = _choosing("pack_levels")
mean_of_levels = _choosing("mean_of_levels", size=2)
majority_vote = _choosing("majority_vote", size=1)
sign_error_feedback = _choosing("sign_error_feedback")
mean_sign_error_feedback = _choosing("mean_sign_error_feedback")
mean_sign_sums = _choosing("mean_sign_sums")
mean_sign_residual = _choosing("mean_sign_residual")
pack_unambiguous = _choosing("pack_unambiguous")
pack_over_threshold = _choosing("pack_over_threshold", size=4)
mean_of_sparse = _choosing("mean_of_sparse")
round_to_bfloat16 = _choosing("round_to_bfloat16")


@functools.wraps(reference.mean_magnitude)
def mean_magnitude(x: Vector, row_splits: Sequence[int]) -> tf.Tensor:  # noqa: D103
    return mean_of_sums(block_statistics(x, row_splits).l1, row_splits)


def mean_of_sums(sums: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns the mean over each block, float32, of what adds up to `sums`, float64."""
    # Not `/`: a graph would multiply by the reciprocal instead.
    widths = tf.cast(reference.widths(row_splits), tf.float64)
    return tf.cast(tf.math.divide_no_nan(sums, widths), tf.float32)
