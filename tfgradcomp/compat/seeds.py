"""Keras' global seed generator, and the threads that replicas run in."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.distribute import mirrored_run

from tfgradcomp.compat.replace import replace

GLOBAL_GENERATOR = "global_seed_generator"
"""The key of the global generator in Keras' state: no constant before Keras 3.13."""

replace_global_seed_generator = partial(
    replace, seed_generator, "global_seed_generator"
)
"""Makes Keras take its global generator from `function(original)`; it has no setter."""

replace_start_of_replicas = partial(
    replace, mirrored_run._MirroredReplicaThread, "__init__"
)
"""Replaces the creation of replicas' threads, where TensorFlow has no public hook.

The function is called as `function(original, thread, *args, **kwargs)`.
"""


def global_seed_generator() -> keras.random.SeedGenerator:
    """Returns the generator of random numbers without a seed, created if need be.

    Keras has no public access to it.
    """
    return seed_generator.global_seed_generator()


def state_of_thread() -> dict[str, Any]:
    """Returns the private global state that Keras keeps for this thread.

    `clear_session` creates another state.
    """
    return vars(global_state.GLOBAL_STATE_TRACKER)
