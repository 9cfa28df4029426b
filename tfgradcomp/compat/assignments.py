"""Assignments of values to Keras variables, which have no hook for them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.saving import saving_lib

from tfgradcomp.compat.replace import replace


class AssignmentWatcher(Protocol):
    """Is told that a program has assigned a variable."""

    def assigned(self, variable: keras.Variable) -> None:
        """Takes note of the assignment, after it."""


class _Thread(threading.local):
    """The state of a thread.

    Attributes:
        is_ignoring: Whether assignments are those of a step or of a restore.
        loaded: The variables that the file being loaded has assigned; None outside.
        restored: The watchers that the file has restored.
    """

    is_ignoring = False
    loaded: list[keras.Variable] | None = None
    restored: tuple[AssignmentWatcher, ...] = ()


_thread = _Thread()
# By the ids of variables, which the watchers keep alive.
_watchers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def watch_assignments(
    variables: Iterable[keras.Variable], watcher: AssignmentWatcher
) -> None:
    """Tells `watcher` of each later assignment of the variables outside of a graph.

    All that a program does in Python comes through `assign`: `set_weights` and
    `load_weights` too. Steps of optimizers, and TensorFlow's checkpoints, do not count,
    nor does a step's own code in a replica's context.
    """
    replace(keras.Variable, "assign", _assign)
    replace(keras.Variable, "_restore_from_tensors", _restore_from_tensors)
    replace(saving_lib, "_load_state", _load_state)
    for variable in variables:
        _watchers[id(variable)] = watcher


def note_assignment(variable: keras.Variable) -> None:
    """Tells the watcher of a variable, if it has one, of an assignment."""
    watcher = _watchers.get(id(variable))
    if watcher is None or _thread.is_ignoring or in_stateless_scope():
        return
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return
    if not tf.executing_eagerly():
        return
    if _thread.loaded is not None:
        _thread.loaded.append(variable)
    else:
        watcher.assigned(variable)


def note_restore(watcher: AssignmentWatcher) -> None:
    """Makes a watcher hear of no assignment by the file that is being loaded.

    A file's weights may be read before and after the state of their optimizer.
    """
    _thread.restored += (watcher,)


@contextlib.contextmanager
def assignments_ignored() -> Iterator[None]:
    """Makes assignments in this thread count for nothing while the context lasts."""
    before, _thread.is_ignoring = _thread.is_ignoring, True
    try:
        yield
    finally:
        _thread.is_ignoring = before


def _assign(original, variable, value):
    result = original(variable, value)
    note_assignment(variable)
    return result


def _restore_from_tensors(original, variable, restored_tensors):
    with assignments_ignored():
        return original(variable, restored_tensors)


def _load_state(original, *args, **kwargs):
    if _thread.loaded is not None:
        # It calls itself for parts of the model.
        return original(*args, **kwargs)
    _thread.loaded, _thread.restored = [], ()
    try:
        return original(*args, **kwargs)
    finally:
        loaded, _thread.loaded = _thread.loaded, None
        for variable in loaded:
            if _watchers.get(id(variable)) not in _thread.restored:
                note_assignment(variable)
        _thread.restored = ()
