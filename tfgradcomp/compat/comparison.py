"""Comparison of values between replicas, by hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgradcomp.core.digest import digest64


def compare(values: Sequence[Iterable[np.ndarray]], hosts: Any) -> np.ndarray:
    """Returns which workers have other values than most.

    All workers must call it, outside of a graph. It moves two integers a value.

    Args:
        values: Of each value, those of this process' replicas.
        hosts: The collectives between the processes; None where there is one.

    Returns:
        bool `[num_workers, num_values]`: whether replicas of the worker differ, or all
        have another value than most workers; than worker 0, if there is no majority.
    """
    if not values:
        return np.zeros([1, 0], bool)
    hashes = [[digest64(value.tobytes()) for value in own] for own in values]
    # Local replicas may differ, and then the workers need not be compared.
    rows = np.array([[own[0], len({*own}) > 1] for own in hashes], np.int64)
    table = rows[np.newaxis]
    if hosts:
        gathered = hosts.gather(tf.constant(rows.ravel()), f"compare/{rows.size}")
        table = gathered.numpy().reshape([hosts.num_workers, -1, 2])
    found = table[:, :, 0]
    votes = (found[:, np.newaxis] == found).sum(1)
    usual = np.take_along_axis(found, votes.argmax(0)[np.newaxis], 0)
    return (found != usual) | (table[:, :, 1] > 0)
