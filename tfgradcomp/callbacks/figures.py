"""The figures of a sampled step, computed in its graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.callbacks.timestamps import StepTimes, TimestampRows
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compressors import Clip, Compressor, OptimalScale
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.compressors.sparse_compressor import SparseCompressor
from tfgradcomp.core import Context, Layout, State
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
        bucket, layout = observed.bucket, observed.bucket.layout
        context = observed.sent.context._replace(
            prepared=None, second_moments=None, **context
        )
        x = _flat(tensors["x"]) * observed.x.scale
        rounding, p = _rounded(self._compressor, x, tensors["state"], layout, context)
        q = self._compressor.decompress(tensors["payload"], layout)
        return _Vectors(
            bucket=bucket,
            rounding=rounding,
            x=x,
            p=p,
            q=tf.convert_to_tensor(q),
            update=_flat(tensors["update"]),
            elements_sent=tensors["elements_sent"],
        )

    def _assign(self, sampled):
        sums = [self._local_sums(vectors) for vectors in sampled]
        total = {name: tf.add_n([s[name] for s in sums]) for name in sums[0]}
        ratio = tf.math.divide_no_nan
        figures = {
            "quantization_error": tf.sqrt(ratio(total["error"], total["length"])),
            "zero_share": total["zeros"] / total["elements"],
            "clipped_share": total.get("clipped", 0.0) / total["elements"],
            "residual_norm": tf.sqrt(total.get("residual", 0.0)),
            "server_residual_norm": tf.sqrt(total.get("server_residual", 0.0)),
            "block_variation": ratio(total["variation"], total["blocks"]),
            "elements_sent": total["sent"],
            **self._global_figures(sampled),
        }
        values = [tf.cast(figures[name], tf.float32) for name in self.names]
        self._figures.assign(tf.stack(values))
        self._assign_histograms(sampled)

    def _local_sums(self, vectors):
        """Returns sums over a bucket, float64 scalars, by names."""
        bucket, p, q = vectors.bucket, vectors.p, vectors.q
        layout, splits = bucket.layout, bucket.layout.row_splits
        # The zeros that align a bucket are no elements of the gradient.
        inside = slice(bucket.bucket_range.alignment_padding, None)
        varies = bucket.has_variable_length
        sums = {
            "elements": bucket.size,
            "error": _square(q - p),
            "length": _square(p),
            "zeros": tf.math.count_nonzero(tf.equal(q[inside], 0)),
            "sent": vectors.elements_sent if varies else bucket.size,
        }
        statistics = ops.block_statistics(vectors.x, splits)
        width = tf.cast(ops.widths(splits), tf.float64)
        mean = statistics.l1 / width
        variance = tf.maximum(statistics.sum_of_squares / width - mean * mean, 0)
        counts = (width > 1) & (mean > 0)
        variation = tf.where(counts, tf.math.divide_no_nan(tf.sqrt(variance), mean), 0)
        sums["variation"] = tf.reduce_sum(variation)
        sums["blocks"] = tf.math.count_nonzero(counts)
        if isinstance(vectors.rounding, Clip):
            limit = vectors.rounding.limit(ops.block_statistics(p, splits), layout)
            is_clipped = tf.abs(p) > ops.spread(limit, splits)
            sums["clipped"] = tf.math.count_nonzero(is_clipped)
        # After the step, the variables hold the new state.
        for role, name in (("worker", "residual"), ("server", "server_residual")):
            leaves = _residuals(bucket, role)
            if leaves:
                sums[name] = sum(_square(tf.cast(v, tf.float32)) for v in leaves)
        return {name: tf.cast(value, tf.float64) for name, value in sums.items()}

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
            "cosine": _cosine(update, mean),
            "gradient_density": density(mean),
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
        return tf.where(count > 1, density(tf.sqrt(squares)), np.nan)

    def _sample_of(self, sampled, name):
        parts = []
        for vectors in sampled:
            begin = vectors.bucket.bucket_range.alignment_padding
            parts.append(getattr(vectors, name)[begin :: self._stride])
        return tf.concat(parts, 0)

    def _assign_histograms(self, sampled):
        for position, variable in self._histograms.items():
            rows = []
            for name in ("x", "q", "update"):
                pieces: dict = {}
                for vectors in sampled:
                    pieces |= vectors.bucket.split(getattr(vectors, name))
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
        chain = [self._compressor]
        while isinstance(chain[-1], Wrapper):
            chain.append(chain[-1].compressor)
        bucket = self._buckets[0]
        exists = {
            "quantization_error": chain[-1].is_scaled,
            "cosine": True,
            "zero_share": True,
            "clipped_share": any(isinstance(part, Clip) for part in chain),
            "residual_norm": bool(_residuals(bucket, "worker")),
            "server_residual_norm": bool(_residuals(bucket, "server")),
            "vote_margin": self._votes,
            "tie_rate": self._votes,
            "gradient_density": True,
            "noise_density": True,
            "block_variation": True,
            "elements_sent": True,
        }
        return [name for name, is_there in exists.items() if is_there]

    def _histogram_shape(self, position):
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        size = sum(p.end - p.begin for p in pieces if p.position == position)
        stride = _odd_stride(size, MOST_IN_HISTOGRAM)
        return [len(KINDS), len(range(0, size, stride))]


class _Vectors(NamedTuple):
    """The vectors of one bucket, in a step that is sampled.

    Attributes:
        bucket: The bucket.
        rounding: The part of the compressor that rounds `p`.
        x: This worker's mean gradient.
        p: Input of the rounding: `x` with the method's momentum and residual.
        q: The decoded payload.
        update: The decoded reply.
        elements_sent: Number of elements in the payload.
    """

    bucket: Bucket
    rounding: Compressor
    x: tf.Tensor
    p: tf.Tensor
    q: tf.Tensor
    update: tf.Tensor
    elements_sent: tf.Tensor


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


def _rounded(
    compressor: Compressor, x: tf.Tensor, state: State, layout: Layout, context: Context
) -> tuple[Compressor, tf.Tensor]:
    """Returns the part of a compressor that rounds, and its input.

    The input contains momentum and residuals; clipping is a part of the rounding.
    """
    rounding = Clip, OptimalScale
    while isinstance(compressor, Wrapper) and not isinstance(compressor, rounding):
        x = compressor.transform(x, state, layout, context)
        state = compressor.inner_state(state)
        compressor = compressor.compressor
    if isinstance(compressor, SparseCompressor):
        x += state["residual"]
    return compressor, x


def _residuals(bucket: Bucket, role: str) -> list:
    leaves = bucket.state.named_leaves()
    return [leaf for r, name, leaf in leaves if r == role and name.endswith("residual")]


def _flat(parts: list[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def _square(x: tf.Tensor) -> tf.Tensor:
    """Returns the squared length of a vector, float64."""
    largest = tf.reduce_max(tf.abs(x))
    unit = tf.math.divide_no_nan(x, largest)
    squared = tf.cast(tf.reduce_sum(unit * unit), tf.float64)
    return squared * tf.square(tf.cast(largest, tf.float64))


def _cosine(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    a, b = (tf.math.divide_no_nan(v, tf.reduce_max(tf.abs(v))) for v in (a, b))
    return tf.math.divide_no_nan(tf.reduce_sum(a * b), tf.norm(a) * tf.norm(b))


def density(vector: tf.Tensor) -> tf.Tensor:
    r"""Returns \( \|v\|_1^2 / (d\,\|v\|_2^2) \): 1 where all magnitudes are equal."""
    unit = tf.math.divide_no_nan(vector, tf.reduce_max(tf.abs(vector)))
    ones = tf.reduce_sum(tf.abs(unit))
    size = tf.cast(tf.size(unit), tf.float32)
    return tf.math.divide_no_nan(ones * ones, size * tf.reduce_sum(unit * unit))


def _odd_stride(size: int, most: int) -> int:
    """Returns the stride for a sample of at most `most` elements.

    An odd stride does not meet the rows of a matrix at the same column each time.
    """
    return max(1, -(-size // most)) | 1


def _variable(value, name):
    return PerReplicaVariable(value, f"compression_monitor_{name}")
