"""Observers of a `Stepper`: the gradients of a step, durations, and later errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine.device_sharded_bucket import Bucket
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.probe import ObservedStep
from tfgradcomp.planning.layer_errors import (
    Gradients,
    squared_errors,
    squared_lengths,
)

# Steps whose durations are kept.
_TIMED_STEPS = 32
_APPLIED, _READY, _EXCHANGED = range(3)


class StepSample:
    """Keeps the newest gradients from a step on, and the durations of the last steps.

    Args:
        plan: The plan of the optimizer, whose workers have one device each.
        first: The first step whose gradients are kept.
    """

    needs_all_buckets = False

    def __init__(self, plan: Plan, first: int):
        self._variables, self._first = plan.variables, first
        self._buckets = _compressed_buckets(plan)
        zeros = [tf.zeros([bucket.layout.size]) for bucket in self._buckets]
        self._own = [_variable(vector, "own") for vector in zeros]
        self._mean = [_variable(vector, "mean") for vector in zeros]
        self._is_sampled = [_variable(tf.constant(False), "bucket") for _ in zeros]
        self._step = _variable(tf.constant(-1, tf.int64), "step")
        self._times = _variable(tf.zeros([_TIMED_STEPS, 3], tf.float64), "times")

    def observe(self, step: ObservedStep) -> None:
        """Adds the copies to the graph of a step."""
        number, vectors = step.context.step, _vectors(step, self._buckets)

        def keep(vectors, number):
            for index, is_sampled in enumerate(self._is_sampled):
                is_sampled.assign(index in vectors)
                if index in vectors:
                    own, mean = vectors[index]
                    self._own[index].assign(own)
                    self._mean[index].assign(mean)
            self._step.assign(number)

        is_due = (number >= self._first) & tf.reduce_all(tf.equal(step.flags, 0))
        conditional(is_due, keep, lambda *_: None, args=(vectors, number))
        self._observe_times(step)

    def _observe_times(self, step):
        times: dict[str, list] = {"ready": [], "exchanged": []}
        for bucket in step.buckets:
            for name, time in bucket.timestamps:
                if name in times:
                    times[name].append(time)
        ready, exchanged = (tf.reduce_max(tf.stack(t)) for t in times.values())
        row = tf.stack([step.applied, ready, exchanged])[tf.newaxis]
        index = tf.reshape(step.context.step % _TIMED_STEPS, [1, 1])
        rows = tf.convert_to_tensor(self._times)
        self._times.assign(tf.tensor_scatter_nd_update(rows, index, row))

    # Outside of the graph.

    @property
    def step(self) -> int:
        """The step whose gradients are kept; -1 if there is none."""
        return int(self._step.numpy())

    def compute_seconds(self) -> float:
        """Returns the median duration of a step, less the exchange that it waits for.

        That is the time from one update to the next, less the time from the last
        gradient to the last reply. 0 where the clock cannot be read.
        """
        rows = self._times.numpy()
        rows = rows[rows[:, _APPLIED] > 0]
        rows = rows[np.argsort(rows[:, _APPLIED])]
        waiting = np.maximum(rows[:, _EXCHANGED] - rows[:, _READY], 0)
        seconds = np.diff(rows[:, _APPLIED]) - waiting[1:]
        return float(np.median(np.maximum(seconds, 0))) if len(seconds) else 0.0

    def gradients(self) -> list[Gradients]:
        """Returns the gradients of the kept step, for each local replica."""
        indices = [i for i, known in enumerate(self._is_sampled) if known.numpy()]
        buckets = [self._buckets[index] for index in indices]
        held = [
            [variables[index].local_values() for index in indices]
            for variables in (self._own, self._mean)
        ]
        pieces = sorted(piece for bucket in buckets for piece in bucket.pieces)
        positions = sorted({piece.position for piece in pieces})
        names = tuple(self._variables[position].path for position in positions)
        shapes = tuple(tuple(self._variables[p].shape) for p in positions)
        found = []
        for replica in range(len(self._step.local_values())):
            own, mean = (
                _joined(buckets, [values[replica] for values in vectors], pieces)
                for vectors in held
            )
            found.append(Gradients(own, mean, names, shapes))
        return found


class ErrorWatch:
    """Measures the errors of a method without memory in some later steps.

    Args:
        plan: The plan of the optimizer, whose workers have one device each.
        steps: The steps.
        workers: N.
    """

    needs_all_buckets = False

    def __init__(self, plan: Plan, steps: Sequence[int]):
        self._variables, self._steps = plan.variables, steps
        self._buckets = _compressed_buckets(plan)
        self._rows = [
            _variable(tf.zeros([3, len(bucket.layout.sizes or ())], tf.float64), "rows")
            for bucket in self._buckets
        ]
        self._step = _variable(tf.constant(-1, tf.int64), "step")

    def observe(self, step: ObservedStep) -> None:
        """Adds the errors to the graph of a step, behind a condition."""
        number, vectors = step.context.step, _vectors(step, self._buckets)

        def measure(vectors, number):
            for index, (own, update) in vectors.items():
                bucket = self._buckets[index]
                method, shapes = bucket.route.method, bucket.layout.known_shapes
                errors = squared_errors(method, own, update, shapes)
                lengths = squared_lengths(update, shapes)[tf.newaxis]
                self._rows[index].assign(tf.concat([errors, lengths], 0))
            self._step.assign(number)

        is_due = tf.reduce_any(tf.equal(number, tf.constant(self._steps, tf.int64)))
        is_due &= tf.reduce_all(tf.equal(step.flags, 0))
        conditional(is_due, measure, lambda *_: None, args=(vectors, number))

    @property
    def step(self) -> int:
        """The last step that was measured; -1 if there is none."""
        return int(self._step.numpy())

    def read(self) -> LayerSquares:
        """Returns the figures of the last step that was measured."""
        count = len(self._variables)
        totals = np.zeros([3, count])
        for bucket, variable in zip(self._buckets, self._rows, strict=True):
            # Replicas share reply and mean.
            rows = variable.local_values()
            joined = np.stack([rows[:, 0].sum(0), rows[0, 1], rows[0, 2]])
            positions = bucket.positions
            for row, values in zip(totals, joined, strict=True):
                np.add.at(row, positions, values[-len(positions) :])
        known = np.flatnonzero(totals[2])
        own, reply, update = totals[:, known]
        names = tuple(self._variables[position].path for position in known)
        return LayerSquares(own, reply, update, names)


class LayerSquares(NamedTuple):
    """Squared lengths of each layer, float64 `[layers]`.

    Attributes:
        own: The errors of the messages of this process.
        reply: The error of the reply.
        update: The decoded reply.
        names: The names of the layers' variables.
    """

    own: np.ndarray
    reply: np.ndarray
    update: np.ndarray
    names: tuple[str, ...]


def _compressed_buckets(plan: Plan) -> list[Bucket]:
    return [b for b in plan.buckets if b.is_compressed and b.vector == "compressed"]


def _vectors(step: ObservedStep, buckets: Sequence[Bucket]) -> dict[int, tuple]:
    """Returns gradient and decoded reply of the buckets that take part, by indices."""
    observed = {one.bucket.name: one for one in step.buckets}
    return {
        index: (tf.convert_to_tensor(one.x), tf.convert_to_tensor(one.update))
        for index, bucket in enumerate(buckets)
        if (one := observed.get(bucket.name))
    }


def _joined(buckets, vectors, pieces):
    """Joins the vectors of buckets, in the order of the variables."""
    parts: dict = {}
    for bucket, vector in zip(buckets, vectors, strict=True):
        parts |= bucket.split(tf.constant(vector))
    return tf.concat([tf.zeros([0]), *[parts[piece] for piece in pieces]], 0)


def _variable(value: tf.Tensor, name: str) -> PerReplicaVariable:
    return PerReplicaVariable.known(value, f"auto_{name}")
