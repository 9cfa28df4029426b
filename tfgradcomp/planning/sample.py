"""The gradients of one step, and the durations of some, observed from within."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.probe import ObservedStep
from tfgradcomp.planning.layer_errors import Gradients

# Steps whose durations are kept.
_TIMED_STEPS = 32


class StepSample:
    """Keeps the gradients of the newest steps of interest; an observer of a `Stepper`.

    Args:
        plan: The plan of the optimizer, whose workers have one device each.
        steps: The first step of interest and the step after the last, as pairs.
    """

    def __init__(self, plan: Plan, steps: list[tuple[int, int]]):
        self._variables, self._steps = plan.variables, steps
        self._indices = [
            index
            for index, bucket in enumerate(plan.buckets)
            if bucket.is_compressed and bucket.vector == "compressed"
        ]
        self._buckets = [plan.buckets[index] for index in self._indices]
        sizes = [bucket.layout.size for bucket in self._buckets]
        zeros = [tf.zeros([size]) for size in sizes]
        self._own = [PerReplicaVariable.known(z, "sampled_gradient") for z in zeros]
        self._mean = [PerReplicaVariable.known(z, "sampled_mean") for z in zeros]
        self._step = PerReplicaVariable.known(tf.constant(-1, tf.int64), "sampled_step")
        rows = tf.zeros([_TIMED_STEPS, 3], tf.float64)
        self._times = PerReplicaVariable.known(rows, "sampled_times")

    def observe(self, step: ObservedStep) -> None:
        """Adds the copies to the graph of a step, behind a condition."""
        number = step.context.step
        is_due = tf.reduce_any(
            [(number >= first) & (number < end) for first, end in self._steps]
        )
        is_due &= tf.reduce_all(tf.equal(step.flags, 0))
        observed = [step.buckets[index] for index in self._indices]
        vectors = [
            (tf.convert_to_tensor(bucket.x), tf.convert_to_tensor(bucket.update))
            for bucket in observed
        ]

        def keep(vectors, number):
            for (x, update), own, mean in zip(
                vectors, self._own, self._mean, strict=True
            ):
                own.assign(x)
                mean.assign(update)
            self._step.assign(number)

        conditional(
            is_due, keep, lambda vectors, number: None, args=(vectors, number)
        )
        names = {"ready": [], "exchanged": []}
        for bucket in step.buckets:
            for name, time in bucket.timestamps:
                if name in names:
                    names[name].append(time)
        ready, exchanged = (tf.reduce_max(tf.stack(t)) for t in names.values())
        row = tf.stack([step.applied, ready, exchanged])
        index = tf.reshape(number % _TIMED_STEPS, [1, 1])
        times = tf.convert_to_tensor(self._times)
        times = tf.tensor_scatter_nd_update(times, index, row[tf.newaxis])
        self._times.assign(times)

    @property
    def step(self) -> int:
        """The step whose gradients are kept; -1 before the first of interest."""
        return int(self._step.local_values()[0])

    def compute_seconds(self) -> float:
        """Returns the median duration of a step, less the exchange that it waits for.

        That is the time from one update to the next, less the time from the last
        gradient to the last reply.
        """
        rows = self._times.local_values()[0]
        applied, ready, exchanged = rows[np.argsort(rows[:, 0])].T
        known = np.flatnonzero(applied[:-1] > 0)
        periods = np.diff(applied)[known]
        waiting = np.maximum(exchanged - ready, 0)[known + 1]
        if not len(known):
            return 0.0
        return float(np.median(np.maximum(periods - waiting, 0)))

    def gradients(self) -> list[Gradients]:
        """Returns the gradients of the kept step, for each local replica."""
        vectors = [
            [variable.local_values() for variable in held]
            for held in (self._own, self._mean)
        ]
        replicas = len(vectors[0][0]) if self._buckets else 0
        return [self._joined(*([v[i] for v in held] for held in vectors))
                for i in range(replicas)]

    def _joined(self, own, mean):
        """Joins the buckets' vectors of a replica, in the order of the variables."""
        pieces: dict = {}
        for bucket, *both in zip(self._buckets, own, mean, strict=True):
            parts = [bucket.split(tf.constant(vector)) for vector in both]
            pieces |= {piece: tuple(p[piece] for p in parts) for piece in parts[0]}
        ordered = sorted(pieces)
        positions = sorted({piece.position for piece in ordered})
        joined = (
            np.concatenate([np.ravel(pieces[piece][side]) for piece in ordered])
            for side in (0, 1)
        )
        return Gradients(
            *joined,
            names=tuple(self._variables[p].path for p in positions),
            shapes=tuple(tuple(self._variables[p].shape) for p in positions),
        )
