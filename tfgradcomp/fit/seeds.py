"""Random numbers of a model: the global generator in replicas, and all states.

A strategy runs each replica in a thread of its own, and Keras keeps its global seed
generator by thread. So `keras.random.normal(shape)` without a seed would create a new
generator in each trace of a step, which TensorFlow refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgradcomp.compat import seeds as compat
from tfgradcomp.compat.saving import saved_children

_STATE = "_keras_state_of_starter"


def share_global_seeds() -> None:
    """Makes replicas draw from the generator of the thread that runs the strategy."""
    compat.replace_start_of_replicas(_start)
    compat.replace_global_seed_generator(_global_seed_generator)


def _start(original, thread, *args, **kwargs):
    original(thread, *args, **kwargs)
    # A replica may start replicas again.
    setattr(thread, _STATE, _state())


def _state() -> dict[str, Any]:
    own = compat.state_of_thread()
    return getattr(threading.current_thread(), _STATE, own)


def _global_seed_generator(original):
    state = _state()
    if state is compat.state_of_thread():
        return original()
    if state.get(compat.GLOBAL_GENERATOR) is None:
        with tf.init_scope():
            state[compat.GLOBAL_GENERATOR] = keras.random.SeedGenerator()
    return state[compat.GLOBAL_GENERATOR]


def seed_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of a model's seed generators, by their places in the model.

    A place is a path of attributes and layers, as in Keras' files of weights. A
    variable's own path is no name: it counts everything that the process has created.
    """
    found: dict[int, tuple[str, keras.random.SeedGenerator]] = {}
    _visit(model, "seeds", {}, found)
    return {path: generator.state for path, generator in found.values()}


def _visit(item, path, visited, found):
    if isinstance(item, keras.random.SeedGenerator):
        found.setdefault(id(item), (path, item))
        return
    if id(item) in visited:
        return
    children: Iterable | None = saved_children(item)
    if children is None:
        if not isinstance(item, (list, tuple, dict)):
            return
        children = _numbered(item.values() if isinstance(item, dict) else item)
    # Kept, so that no other object gets its id.
    visited[id(item)] = item
    for name, child in children:
        _visit(child, f"{path}/{name}", visited, found)


def _numbered(items):
    """Yields each item with a name: its class, and the number of those before it."""
    counts: dict[str, int] = {}
    for item in items:
        kind = type(item).__name__
        counts[kind] = counts.get(kind, -1) + 1
        yield f"{kind}_{counts[kind]}", item
