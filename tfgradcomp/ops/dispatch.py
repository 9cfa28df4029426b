"""Choice between the native ops and pure TensorFlow, made at every call."""

from __future__ import annotations

import os
import threading
import warnings

import tensorflow as tf

from tfgradcomp.compat.xla import in_xla
from tfgradcomp.ops import library

_BUILD = "python -m tfgradcomp.ops --build"
_MODES = ("auto", "native", "python")

_warned: set[str] = set()
_warned_lock = threading.Lock()


def takes_native(op: str, on_gpu: bool = True) -> bool:
    """Returns whether a call made here and now runs the native op of this name.

    Warns, once, if it does not although it should.

    Args:
        op: Name of the op.
        on_gpu: Whether it has a kernel for GPUs.

    Raises:
        ValueError: If `TFGRADCOMP_OPS` names no mode.
        UnavailableError: If `TFGRADCOMP_OPS` asks for the native op, and there is none.
    """
    mode = os.environ.get("TFGRADCOMP_OPS", "auto")
    if mode not in _MODES:
        raise ValueError(
            f"The environment variable TFGRADCOMP_OPS must be one of {_MODES}. "
            f"Received: TFGRADCOMP_OPS={mode!r}"
        )
    if mode == "python" or in_xla():
        return False
    sees_gpu = library.gpu_is_visible()
    if sees_gpu and not on_gpu:
        return False
    obstacle = _obstacle(op, on_gpu=mode == "auto" and sees_gpu)
    if obstacle is None:
        return True
    if mode == "native":
        raise library.UnavailableError(
            f"TFGRADCOMP_OPS=native, but {obstacle}. Or set TFGRADCOMP_OPS=python to "
            "run in pure TensorFlow"
        )
    _warn_once(
        f"tfgradcomp falls back to pure TensorFlow, which is slower: {obstacle}. "
        "TFGRADCOMP_OPS=python chooses this on purpose, without this warning"
    )
    return False


def can_apply() -> bool:
    """Returns whether `apply_vector` can be called here and now: only on a CPU."""
    return takes_native("apply_vector", on_gpu=False)


def _obstacle(op: str, on_gpu: bool) -> str | None:
    """Returns why an op cannot run natively and what to do, None if it can."""
    try:
        loaded = library.library()
    except library.UnavailableError as error:
        return (
            f"the native ops could not be built or loaded: {error}\nWith a C++ "
            f"compiler installed (g++, or what CXX names), run `{_BUILD}`"
        )
    problem = library.gpu_problem(loaded) if on_gpu else None
    if problem is not None and not _is_for_cpu():
        return (
            f"TensorFlow sees GPUs, but {loaded.path} cannot serve them: {problem}. "
            f"With the nvcc of a CUDA that the GPUs' driver supports, run `{_BUILD}`. "
            "Ops that are placed on a CPU run natively all the same"
        )
    if not loaded.has(op):
        return f"{loaded.path} has no {op}. Run `{_BUILD}`"
    return None


def _is_for_cpu() -> bool:
    """Returns whether an op made here is placed on a CPU, even if there are GPUs."""
    if tf.executing_eagerly():
        device = tf.constant(0.0).device
    else:
        # No other op needs it, so no function runs it.
        device = tf.no_op().device
    return tf.DeviceSpec.from_string(device).device_type == "CPU"


def _warn_once(message: str) -> None:
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    # Names the line that calls the operation.
    warnings.warn(message, RuntimeWarning, stacklevel=4)
