"""Comparison of values between replicas, by their hashes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives.base import Collectives
from tfgradcomp.core.digest import digest64


def compare(
    values: Iterable[Iterable[np.ndarray]], hosts: Collectives | None
) -> np.ndarray:
    """Returns for each worker which of its values differ from the majority's.

    All workers must call it, outside of a graph. It exchanges two integers per value.

    Args:
        values: For each value, the arrays of this process' replicas. They are read one
            after the other.
        hosts: The collectives between the processes; None for a single process.

    Returns:
        bool `[num_workers, num_values]`: True if the worker's replicas differ from each
        other, or if they differ from most workers; without a majority, worker 0 is
        the reference.
    """
    hashes = [[digest64(value) for value in local] for local in values]
    if not hashes:
        return np.zeros([1, 0], bool)
    # If local replicas differ, the comparison between workers does not matter.
    rows = np.array([[local[0], len({*local}) > 1] for local in hashes], np.int64)
    table = rows[np.newaxis]
    if hosts:
        gathered = hosts.gather(tf.constant(rows.ravel()), f"compare/{rows.size}")
        table = gathered.numpy().reshape([hosts.num_workers, -1, 2])
    found = table[:, :, 0]
    votes = (found[:, np.newaxis] == found).sum(1)
    usual = np.take_along_axis(found, votes.argmax(0)[np.newaxis], 0)
    return (found != usual) | (table[:, :, 1] > 0)
