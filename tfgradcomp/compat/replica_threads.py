"""Keras' global random numbers in the threads of replicas.

A strategy runs each replica in a thread of its own, and Keras keeps its global seed
generator by thread. So `keras.random.normal(shape)` without a seed would create a new
one in each trace of a step, which TensorFlow refuses.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.distribute import mirrored_run

from tfgradcomp.compat.replace import replace

_STATE = "_keras_state_of_starter"
# As Keras calls it; the constant is not there before Keras 3.13.
_SEEDS = "global_seed_generator"


def share_global_seeds() -> None:
    """Makes replicas draw from the generator of the thread that runs the strategy."""
    replace(mirrored_run._MirroredReplicaThread, "__init__", _start)
    replace(seed_generator, "global_seed_generator", _global_seed_generator)


def _start(original, thread, *args, **kwargs):
    original(thread, *args, **kwargs)
    # A replica may start replicas again.
    setattr(thread, _STATE, _state())


def _state() -> dict[str, Any]:
    # `clear_session` makes another tracker.
    own = vars(global_state.GLOBAL_STATE_TRACKER)
    return getattr(threading.current_thread(), _STATE, own)


def _global_seed_generator(original):
    state = _state()
    if state is vars(global_state.GLOBAL_STATE_TRACKER):
        return original()
    if state.get(_SEEDS) is None:
        with tf.init_scope():
            state[_SEEDS] = seed_generator.SeedGenerator()
    return state[_SEEDS]
