"""SIGTERM to one worker in `fit`: all workers learn of it after the same step."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from types import FrameType

import keras

from tfgradcomp.compat.trainer import frame_of_fit
from tfgradcomp.fit.loop_sync import signals_of_fit

_SA_RESETHAND = 0x80000000


class Preemption:
    """Records which workers were told to exit by SIGTERM.

    The first SIGTERM is recorded. The second ends the process at once, even inside an
    operation that waits. Nothing changes outside of `fit`, or where the program handles
    SIGTERM itself.

    Args:
        model: The model that is in `fit`.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._is_requested = False

    def begin(self) -> None:
        """Installs the signal handler."""
        signals = signals_of_fit(self._model)
        if signals:
            signals.request_end_of_process(False)
        if threading.current_thread() is not threading.main_thread():
            return
        # TensorFlow has a handler of its own, which Python does not know of.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL or _is_ours():
            signal.signal(signal.SIGTERM, self._handle)
            _reset_at_delivery(signal.SIGTERM)

    def end(self) -> None:
        """Removes the signal handler."""
        if _is_ours() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def workers(self) -> list[int]:
        """Returns the workers that were told to exit, the same list on all workers.

        Call it when a batch or an epoch ends.
        """
        signals = signals_of_fit(self._model)
        if not signals:
            return [0] if self._is_requested else []
        if self._is_requested:
            # Not in the handler, which may interrupt a trace.
            signals.request_end_of_process(True)
        return signals.preempted_workers()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if frame_of_fit(self._model, frame) is None:
            # An error has ended `fit` before `end` was called.
            os.kill(os.getpid(), signum)
        self._is_requested = True


def _is_ours() -> bool:
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(getattr(handler, "__self__", None), Preemption)


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library on Linux."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    ]


def _reset_at_delivery(signum: int) -> None:
    """Makes the kernel remove a handler when it delivers the signal.

    Python's handlers wait for the interpreter, which may be inside an operation that
    never ends.
    """
    sigaction = ctypes.CDLL(None).sigaction
    action = _Action()
    sigaction(signum, None, ctypes.byref(action))
    action.flags |= _SA_RESETHAND
    sigaction(signum, ctypes.byref(action), None)
