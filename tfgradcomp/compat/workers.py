"""The processes of a strategy."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfgradcomp.collectives import base as collectives


def is_multi_worker(strategy) -> bool:
    """Whether the strategy spans several processes."""
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )


@functools.cache
def across_hosts(strategy) -> collectives.Hosts:
    """Returns the collectives between the processes of a multi-worker strategy."""
    return collectives.Hosts(collectives.place_of(strategy))
