"""The stop flags of a Keras model, read in a loop as all workers know them."""

from __future__ import annotations

import inspect

from tfgradcomp.compat.trainer import add_property, code_of_loop
from tfgradcomp.fit.loop_sync import STOP_FLAGS, running_loop


def share_stop_flags() -> None:
    """Makes `stop_training` and the like of one worker end a loop on all workers."""
    for kind, flag in STOP_FLAGS.items():
        add_property(flag, StopFlag(kind))


class StopFlag:
    """A stop flag of Keras' trainer.

    Keras' loop reads the requests that all workers know; any other reader gets this
    worker's value. The value may be set at any time and from any thread, so the loop
    must never see a request that other workers do not see.

    Args:
        kind: Name of the loop's method.
    """

    def __init__(self, kind: str):
        self._kind, self._name = kind, STOP_FLAGS[kind]
        self._code = code_of_loop(kind)

    def __get__(self, model, owner=None):
        if model is None:
            return self
        loop = running_loop(model, self._kind)
        if loop and loop.signals and _code_of_caller() is self._code:
            return loop.is_stopped()
        if self._name not in vars(model):
            raise AttributeError(self._name)
        return vars(model)[self._name]

    def __set__(self, model, value):
        vars(model)[self._name] = value
        loop = running_loop(model, self._kind)
        if loop:
            loop.request_stop(bool(value))


def _code_of_caller():
    """Returns the code that has called the caller of this function."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return frame and frame.f_code
