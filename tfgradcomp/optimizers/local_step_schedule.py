"""The rhythm of local steps: which variables are exchanged together, and how often."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine.probe import time_after

# Exchanges that are measured before `every="auto"` decides.
MEASURED = 8
# The share of the computing time that exchanges may take then, and the most local
# steps from one to the next: more of them cost accuracy.
SHARE, MOST = 0.1, 64


def groups_of(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divides variables into groups of about the size of the largest variable.

    Args:
        sizes: Elements of each variable.
        most: The most groups that are of use.

    Returns:
        Positions of variables, in the order of the model.
    """
    number = max(1, min(most, sum(sizes) // max([1, *sizes])))
    groups: list[list[int]] = [[] for _ in range(number)]
    filled = [0] * number
    for position in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = filled.index(min(filled))
        groups[least].append(position)
        filled[least] += sizes[position]
    return sorted(sorted(group) for group in groups if group) or [[]]


class UnsentSteps:
    """The local steps of each variable since its last exchange, on this worker.

    Attributes:
        variable: int64, a number for each variable of the model.
    """

    def __init__(self, number: int):
        zeros = tf.zeros([number], tf.int64)
        self.variable = PerReplicaVariable(zeros, "unsent_steps")

    def add(self, positions: Collection[int]) -> None:
        """Counts a local step of some variables."""
        self.variable.assign(self.variable + self._is_among(positions))

    def leave(self, positions: Collection[int], steps: int = 0) -> None:
        """Leaves at most so many steps of some variables, after an exchange."""
        counts = tf.convert_to_tensor(self.variable)
        left = tf.minimum(counts, steps)
        among = self._is_among(positions)
        self.variable.assign(left * among + counts * (1 - among))

    def most(self, positions: Collection[int]) -> tf.Tensor:
        """Returns the largest number of some variables."""
        counts = tf.convert_to_tensor(self.variable)
        return tf.reduce_max(tf.gather(counts, sorted(positions)))

    def positions(self) -> tuple[int, ...]:
        """Returns the variables with a step that was not exchanged, outside a graph."""
        return tuple(np.flatnonzero(self.variable.numpy()).tolist())

    def restore(self, counts: np.ndarray) -> None:
        """Assigns a row of numbers, or one number for all, to each local replica."""
        shape = self.variable.local_values().shape
        self.variable.assign_local_values(np.broadcast_to(counts, shape))

    def _is_among(self, positions):
        number = self.variable.shape[0]
        return tf.constant([int(p in positions) for p in range(number)], tf.int64)


class IntervalTuner:
    r"""Measures what local steps and exchanges take, and says how many steps pay.

    \( H = \lceil t_e / (s \, t_c) \rceil \), at most `MOST`, for the shortest exchange
    \( t_e \) of the worker that waits the least, the shortest computing time
    \( t_c \) of the slowest worker, and s = `SHARE`.
    """

    def __init__(self, collectives: Collectives):
        """Creates the variables.

        Args:
            collectives: What lets the workers agree.
        """
        self._collectives = collectives
        # How many, when the last one ended, the shortest steps and exchanges.
        initial = tf.constant([0.0, 0.0, float("inf"), float("inf")], tf.float64)
        self._times = PerReplicaVariable(initial, "local_times")

    def measure(self, variables: list, exchange: Callable) -> tf.Tensor:
        """Exchanges, measures, and decides once enough has been measured.

        Args:
            variables: Those that the local step has changed, and the exchange does.
            exchange: Called without arguments.

        Returns:
            The number of local steps, int64; 0 before it is known.
        """
        count, last, step, shortest = tf.unstack(tf.convert_to_tensor(self._times))
        begin = _now(variables)
        exchange()
        end = _now(variables)
        # There is no step before the first exchange: it began with a trace.
        step = tf.where(count > 0, tf.minimum(step, begin - last), step)
        shortest = tf.where(count > 0, tf.minimum(shortest, end - begin), shortest)
        self._times.assign(tf.stack([count + 1, end, step, shortest]))
        slowest = self._collectives.max(
            tf.cast(tf.stack([step, -shortest]), tf.float32), "local_steps/times"
        )
        unknown = tf.zeros([], tf.int64)
        return tf.where(count < MEASURED, unknown, steps_that_pay(slowest))


def steps_that_pay(slowest: tf.Tensor) -> tf.Tensor:
    """Returns H, of the longest step and minus the shortest exchange, in seconds."""
    step, exchange = slowest[0], -slowest[1]
    # XLA compiles no clock: all times are 0 there.
    ratio = tf.math.divide_no_nan(exchange, SHARE * step)
    return tf.cast(tf.clip_by_value(tf.math.ceil(ratio), 1, MOST), tf.int64)


def _now(variables):
    return time_after([tf.convert_to_tensor(variable) for variable in variables])
