"""The figures of a sampled step, computed in its graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.callbacks import measures
from tfgradcomp.callbacks.timestamps import StepTimes, TimestampRows
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine.device_sharded_bucket import Bucket
from tfgradcomp.engine.probe import ObservedBucket, ObservedStep
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.servers import MajorityVote

# Largest number of gradient elements that are reduced over the workers.
MOST_SAMPLED = 2**20
# Largest number of a variable's elements in a histogram.
MOST_IN_HISTOGRAM = 2**16
KINDS = ("gradient", "sent", "update")
# A worker that waits for others in the collective logs this name.
CALL_SITE = "CompressionMonitor, which all workers need if one has it"
_CONTEXT_TENSORS = ("step", "seed", "learning_rate", "previous_learning_rate")


class Sample(NamedTuple):
    """Results of a sampled step.

    Attributes:
        step: Number of updates applied before the step.
        figures: The figures by their names.
        times: The times of the step; None if XLA compiled it.
        histograms: For each chosen variable, by its position: samples `[3, any]` of
            its gradient, of the values sent for it and of its update.
    """

    step: int
    figures: dict[str, float]
    times: StepTimes | None
    histograms: dict[int, np.ndarray]


class Figures:
    """Computes the figures of every n-th step; an observer of a `Stepper`.

    Its variables are local to this worker and belong to no model.

    Args:
        optimizer: The wrapper, built.
        every: Steps from one sample to the next.
        positions: Positions of the variables whose histograms are sampled.
    """

    needs_all_buckets = True

    def __init__(self, optimizer: CompressedOptimizer, every: int, positions: list):
        stepper = optimizer.stepper
        self._compressor = optimizer.method.compressor
        self._collectives, self._every = stepper.collectives, every
        # The vector of a table's rows differs from step to step, and variables that a
        # policy names have another method.
        self._indices = [
            index
            for index, bucket in enumerate(stepper.buckets)
            if bucket.is_compressed and bucket.vector == "compressed"
        ]
        self._buckets = [stepper.buckets[index] for index in self._indices]
        sizes = [bucket.size for bucket in self._buckets]
        self._stride = _odd_stride(sum(sizes), MOST_SAMPLED)
        self._sampled = sum(len(range(0, size, self._stride)) for size in sizes)
        server = optimizer.method.server
        self._votes = isinstance(server, MajorityVote) and bool(self._buckets)
        self.names = self._names() if self._buckets else []
        self._timestamps = TimestampRows([bucket.name for bucket in stepper.buckets])
        width = self._timestamps.width
        self._serial = _variable(tf.zeros([], tf.int64), "serial")
        self._figures = _variable(tf.zeros([len(self.names)]), "figures")
        self._row = _variable(tf.zeros([width], tf.float64), "timestamps")
        self._mean = _variable(tf.zeros([self._sampled]), "mean")
        self._squares = _variable(tf.zeros([self._sampled]), "squares")
        self._histograms = {
            position: _variable(tf.zeros(self._histogram_shape(position)), "histogram")
            for position in positions
            if any(position in bucket.positions for bucket in self._buckets)
        }

    # In the graph of a step.

    def observe(self, step: ObservedStep) -> None:
        """Adds the figures to the graph of a step, behind a condition."""
        if step.is_uncompressed_step:
            return
        is_due = tf.equal(step.context.step % self._every, 0)
        is_due &= tf.reduce_all(tf.equal(step.flags, 0))
        observed = [step.buckets[index] for index in self._indices]
        # A branch must take the tensors of a replica as arguments.
        arguments = {
            "row": self._timestamps.row(step),
            "context": {n: getattr(step.context, n) for n in _CONTEXT_TENSORS},
            "buckets": [_tensors_of(bucket) for bucket in observed],
        }

        def sample(tensors):
            self._serial.assign(tf.convert_to_tensor(self._serial) + 1)
            self._row.assign(tensors["row"])
            pairs = zip(observed, tensors["buckets"], strict=True)
            sampled = [self._vectors(*pair, tensors["context"]) for pair in pairs]
            if sampled:
                self._assign(sampled)

        conditional(is_due, sample, lambda tensors: None, args=(arguments,))

    def _vectors(self, observed, tensors, context):
        bucket = observed.bucket
        context = observed.sent.context._replace(
            prepared=None, second_moments=None, **context
        )
        varies = bucket.has_variable_length
        vectors = measures.Vectors.of(
            self._compressor,
            _flat(tensors["x"]) * observed.x.scale,
            tensors["state"],
            tensors["payload"],
            bucket.layout,
            context,
            elements_sent=tensors["elements_sent"] if varies else bucket.size,
            # The zeros that align a bucket are no elements of the gradient.
            padding=bucket.bucket_range.alignment_padding,
        )
        return _Sampled(bucket, vectors, _flat(tensors["update"]))

    def _assign(self, sampled):
        # After the step, the variables hold the new state.
        sums = [
            measures.sums(vectors, *self._residuals(bucket))
            for bucket, vectors, _ in sampled
        ]
        total = {name: tf.add_n([s[name] for s in sums]) for name in sums[0]}
        figures = {**measures.figures(total), **self._global_figures(sampled)}
        values = [tf.cast(figures[name], tf.float32) for name in self.names]
        self._figures.assign(tf.stack(values))
        self._assign_histograms(sampled)

    def _residuals(self, bucket):
        """Returns this worker's residuals and the server's."""
        state = tf.nest.map_structure(tf.convert_to_tensor, bucket.state)
        own = measures.residuals(self._compressor, state.worker, bucket.layout)
        return own, measures.residual_leaves(state.server)

    def _global_figures(self, sampled):
        """Returns the figures that need a sum over the workers, of sampled elements."""
        count = self._collectives.num_workers
        local = self._sample_of(sampled, "x")
        message = [local]
        if self._votes:
            message.append(self._sample_of(sampled, "q"))
        total = self._collectives.sum(tf.concat(message, 0), CALL_SITE)
        mean = total[: self._sampled] / count
        update = self._sample_of(sampled, "update")
        noise = local - mean if count > 1 else local
        figures = {
            "cosine": measures.cosine(update, mean),
            "gradient_density": measures.density(mean),
            "noise_density": self._noise_density(noise),
        }
        if self._votes:
            net = total[self._sampled :]
            figures["vote_margin"] = tf.reduce_mean(tf.abs(net)) / count
            figures["tie_rate"] = tf.reduce_mean(tf.cast(tf.equal(net, 0), tf.float32))
        return figures

    def _noise_density(self, noise):
        """Takes a step of Welford's algorithm; NaN until there are two samples."""
        count = tf.cast(tf.convert_to_tensor(self._serial), tf.float32)
        mean = tf.convert_to_tensor(self._mean)
        change = noise - mean
        mean += change / count
        squares = tf.convert_to_tensor(self._squares) + change * (noise - mean)
        self._mean.assign(mean)
        self._squares.assign(squares)
        return tf.where(count > 1, measures.density(tf.sqrt(squares)), np.nan)

    def _sample_of(self, sampled, name):
        parts = []
        for each in sampled:
            parts.append(each.vector(name)[each.vectors.padding :: self._stride])
        return tf.concat(parts, 0)

    def _assign_histograms(self, sampled):
        for position, variable in self._histograms.items():
            rows = []
            for name in ("x", "q", "update"):
                pieces: dict = {}
                for each in sampled:
                    pieces |= each.bucket.split(each.vector(name))
                found = sorted(piece for piece in pieces if piece.position == position)
                flat = _flat([pieces[piece] for piece in found])
                rows.append(flat[:: _odd_stride(flat.shape[0], MOST_IN_HISTOGRAM)])
            variable.assign(tf.stack(rows))

    # Outside of the graph.

    def read(self, serial: int) -> Sample | None:
        """Returns the newest sample, by local reads; None if there is no new one.

        Args:
            serial: Number of samples that are known already.
        """
        if self.serial == serial:
            return None
        # The mean over the devices of this process, and the first device's timestamps.
        means = self._figures.local_values().mean(axis=0).tolist()
        figures = dict(zip(self.names, means, strict=True))
        row = self._row.local_values()[0]
        return Sample(
            int(row[0]),
            {name: value for name, value in figures.items() if np.isfinite(value)},
            self._timestamps.read(row),
            {p: variable.local_values()[0] for p, variable in self._histograms.items()},
        )

    @property
    def serial(self) -> int:
        """Number of samples so far."""
        return int(self._serial.local_values()[0])

    def _names(self):
        bucket = self._buckets[0]
        has_residual, has_server_residual = (
            bool(measures.residual_leaves(state))
            for state in (bucket.state.worker, bucket.state.server)
        )
        local = measures.names(self._compressor, has_residual, has_server_residual)
        votes = ["vote_margin", "tie_rate"] if self._votes else []
        return [*local, "cosine", *votes, "gradient_density", "noise_density"]

    def _histogram_shape(self, position):
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        size = sum(p.end - p.begin for p in pieces if p.position == position)
        stride = _odd_stride(size, MOST_IN_HISTOGRAM)
        return [len(KINDS), len(range(0, size, stride))]


class _Sampled(NamedTuple):
    """A bucket in a step that is sampled.

    Attributes:
        bucket: The bucket.
        vectors: This worker's vectors.
        update: The decoded reply.
    """

    bucket: Bucket
    vectors: measures.Vectors
    update: tf.Tensor

    def vector(self, name: str) -> tf.Tensor:
        """Returns `x`, `q` or `update`."""
        return self.update if name == "update" else getattr(self.vectors, name)


def _tensors_of(observed: ObservedBucket) -> dict[str, Any]:
    """Returns the tensors of a bucket from which figures are computed."""
    update = observed.update
    return {
        "x": list(observed.x),
        "state": observed.state,
        "payload": observed.sent.payload,
        "update": [update] if tf.is_tensor(update) else list(update),
        "elements_sent": tf.cast(observed.sent.elements_sent, tf.int64),
    }


def _flat(parts: list[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def _odd_stride(size: int, most: int) -> int:
    """Returns the stride for a sample of at most `most` elements.

    An odd stride does not meet the rows of a matrix at the same column each time.
    """
    return max(1, -(-size // most)) | 1


def _variable(value, name):
    return PerReplicaVariable(value, f"compression_monitor_{name}")
