"""Keras' global seed generator, and the threads that replicas run in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.distribute import mirrored_run

from tfgradcomp.compat.replace import replace

GLOBAL_GENERATOR = "global_seed_generator"
"""The key of the global generator in Keras' state: no constant before Keras 3.13."""


def global_seed_generator() -> keras.random.SeedGenerator:
    """Returns the generator of random numbers without a seed, created if need be.

    Keras has no public access to it.
    """
    return seed_generator.global_seed_generator()


def replace_global_seed_generator(function: Callable) -> None:
    """Makes Keras take its global generator from a function.

    Keras cannot be given a generator of its own.

    Args:
        function: Called as `function(original)`.
    """
    replace(seed_generator, "global_seed_generator", function)


def state_of_thread() -> dict[str, Any]:
    """Returns the global state that Keras keeps for this thread.

    Keras has no public access to it. `clear_session` makes another one.
    """
    return vars(global_state.GLOBAL_STATE_TRACKER)


def replace_start_of_replicas(function: Callable) -> None:
    """Makes threads of replicas be created by a function.

    TensorFlow has no public hook there.

    Args:
        function: Called as `function(original, thread, *args, **kwargs)`.
    """
    replace(mirrored_run._MirroredReplicaThread, "__init__", function)
