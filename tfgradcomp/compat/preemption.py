"""SIGTERM to one worker in `fit`, as all workers learn of it after the same step."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from types import FrameType

import keras

from tfgradcomp.compat.lockstep import signals_of_fit
from tfgradcomp.compat.trainer import frame_of_fit

_SA_RESETHAND = 0x80000000


class Preemption:
    """Notes which workers were told to end by SIGTERM.

    The first SIGTERM is noted, the second ends the process at once, even where it waits
    in an operation. Outside of `fit`, and where the program handles SIGTERM by itself,
    nothing is changed.

    Args:
        model: The model that is in `fit`.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._is_told = False

    def begin(self) -> None:
        """Begins to listen."""
        signals = signals_of_fit(self._model)
        if signals:
            signals.request_end_of_process(False)
        if threading.current_thread() is not threading.main_thread():
            return
        # TensorFlow has a handler of its own, which Python does not know of.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL or _is_ours():
            signal.signal(signal.SIGTERM, self._note)
            _reset_at_delivery(signal.SIGTERM)

    def end(self) -> None:
        """Ends it."""
        if _is_ours() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def workers(self) -> list[int]:
        """Returns the workers that were told to end, the same on all of them.

        To be called as a batch or an epoch ends.
        """
        signals = signals_of_fit(self._model)
        if not signals:
            return [0] if self._is_told else []
        if self._is_told:
            # Not in the handler, which may interrupt a trace.
            signals.request_end_of_process(True)
        return signals.leavers()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if frame_of_fit(self._model, frame) is None:
            # An error has ended `fit` before `end` was called.
            os.kill(os.getpid(), signum)
        self._is_told = True


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
    """Makes the kernel take a handler away as it delivers the signal.

    Python's handlers wait for the interpreter, which may be inside of an operation that
    never ends.
    """
    sigaction = ctypes.CDLL(None).sigaction
    action = _Action()
    sigaction(signum, None, ctypes.byref(action))
    action.flags |= _SA_RESETHAND
    sigaction(signum, ctypes.byref(action), None)
