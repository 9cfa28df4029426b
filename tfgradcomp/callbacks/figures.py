"""The figures of a sampled step, computed in its graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.callbacks.moments import Moments, StepTimes
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compressors import Clip, Compressor, OptimalScale
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.compressors.sparse_compressor import SparseCompressor
from tfgradcomp.core import Context, Layout, State
from tfgradcomp.engine.gradient_bucket import GradientBucket
from tfgradcomp.engine.probe import ObservedBucket, ObservedStep
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.servers import MajorityVote

# Elements of the gradient that are reduced over the workers, at most.
MOST_SAMPLED = 2**20
# Elements of a variable that a histogram is made of, at most.
MOST_IN_HISTOGRAM = 2**16
KINDS = ("gradient", "sent", "update")
# What a worker that waits for another one says.
CALL_SITE = "CompressionMonitor, which all workers need if one has it"


class Sample:
    """Results of a sampled step.

    Attributes:
        step: The number of updates applied before it.
        figures: The figures by their names.
        times: Its times; None where XLA compiled it.
        histograms: For each chosen variable, by its position: samples `[3, any]` of
            its gradient, of what was sent for it and of its update.
    """

    def __init__(
        self,
        step: int,
        figures: dict[str, float],
        times: StepTimes | None,
        histograms: dict[int, np.ndarray],
    ):
        self.step, self.figures, self.times = step, figures, times
        self.histograms = histograms


class Figures:
    """Computes the figures of every so many steps; an observer of a `Probe`.

    Its variables are this worker's own and belong to no model.

    Args:
        optimizer: The wrapper, built.
        every: Steps from one sample to the next.
        positions: The variables that histograms are wanted of.
    """

    def __init__(self, optimizer: CompressedOptimizer, every: int, positions: list):
        stepper = optimizer.stepper
        self._compressor = optimizer.method.compressor
        self._collectives, self._every = stepper.collectives, every
        self._indices = [
            index
            for index, bucket in enumerate(stepper.buckets)
            # Of a table of rows each step has another vector, and what a policy names
            # has another method.
            if bucket.is_compressed and bucket.vector == "compressed"
        ]
        self._buckets = [stepper.buckets[index] for index in self._indices]
        sizes = [bucket.size for bucket in self._buckets]
        # Odd, so that rows of a matrix are not met at the same column each time.
        self._stride = max(1, -(-sum(sizes) // MOST_SAMPLED)) | 1
        self._sampled = sum(len(range(0, size, self._stride)) for size in sizes)
        server = optimizer.method.server
        self._votes = isinstance(server, MajorityVote) and bool(self._buckets)
        self.names = self._names() if self._buckets else []
        self._moments = Moments([bucket.name for bucket in stepper.buckets])
        self._serial = _variable(tf.zeros([], tf.int64), "serial")
        self._figures = _variable(tf.zeros([len(self.names)]), "figures")
        self._row = _variable(tf.zeros([self._moments.width], tf.float64), "moments")
        self._mean = _variable(tf.zeros([self._sampled]), "mean")
        self._squares = _variable(tf.zeros([self._sampled]), "squares")
        self._histograms = {
            position: _variable(tf.zeros(self._histogram_shape(position)), "histogram")
            for position in positions
            if any(position in bucket.positions for bucket in self._buckets)
        }

    # In the graph.

    def observe(self, step: ObservedStep) -> None:
        """Adds the figures to the graph of a step, behind a condition."""
        if step.is_uncompressed_step:
            return
        context = step.context
        is_due = tf.equal(context.step % self._every, 0)
        is_due &= tf.reduce_all(tf.equal(step.flags, 0))
        observed = [step.buckets[index] for index in self._indices]
        arguments = {
            "row": self._moments.row(step),
            "step": context.step,
            "seed": context.seed,
            "learning_rate": context.learning_rate,
            "previous_learning_rate": context.previous_learning_rate,
            "buckets": [_tensors_of(one) for one in observed],
        }

        def sample(given):
            self._sample(
                [(o.bucket, o.x.scale, o.sent.context) for o in observed], given
            )

        conditional(is_due, sample, lambda given: None, args=(arguments,))

    def _sample(self, kept, given):
        self._serial.assign(tf.convert_to_tensor(self._serial) + 1)
        self._row.assign(given["row"])
        if not self._buckets:
            return
        vectors = []
        for (bucket, scale, context), own in zip(kept, given["buckets"], strict=True):
            context = context._replace(
                prepared=None,
                second_moments=None,
                **{
                    name: given[name]
                    for name in (
                        *("step", "seed"),
                        *("learning_rate", "previous_learning_rate"),
                    )
                },
            )
            vectors.append(_Vectors(bucket, self._compressor, scale, context, own))
        totals = [self._local_sums(one) for one in vectors]
        total = {name: tf.add_n([one[name] for one in totals]) for name in totals[0]}
        elements = total["elements"]
        figures = {
            "quantization_error": tf.sqrt(
                tf.math.divide_no_nan(total["error"], total["length"])
            ),
            "zero_share": total["zeros"] / elements,
            "clipped_share": total.get("clipped", 0.0) / elements,
            "residual_norm": tf.sqrt(total.get("residual", 0.0)),
            "server_residual_norm": tf.sqrt(total.get("server_residual", 0.0)),
            "block_variation": tf.math.divide_no_nan(
                total["variation"], total["blocks"]
            ),
            "elements_sent": total["sent"],
            **self._of_all_workers(vectors),
        }
        values = [tf.cast(figures[name], tf.float32) for name in self.names]
        self._figures.assign(tf.stack(values))
        self._assign_histograms(vectors)

    def _local_sums(self, one):
        """Returns sums over a bucket, float64 scalars, by names."""
        p, q, splits = one.p, one.q, one.layout.row_splits
        # The zeros that align a bucket are no elements of the gradient.
        inside = slice(one.bucket.bucket_range.alignment_padding, None)
        varies = one.bucket.has_variable_length
        sums = {
            "elements": one.bucket.size,
            "error": _square(q - p),
            "length": _square(p),
            "zeros": tf.math.count_nonzero(tf.equal(q[inside], 0)),
            "sent": one.elements_sent if varies else one.bucket.size,
        }
        statistics = ops.block_statistics(one.x, splits)
        width = tf.cast(ops.widths(splits), tf.float64)
        mean = statistics.l1 / width
        variance = tf.maximum(statistics.sum_of_squares / width - mean * mean, 0)
        counts = (width > 1) & (mean > 0)
        variation = tf.where(counts, tf.math.divide_no_nan(tf.sqrt(variance), mean), 0)
        sums["variation"] = tf.reduce_sum(variation)
        sums["blocks"] = tf.math.count_nonzero(counts)
        if isinstance(one.rounding, Clip):
            limit = one.rounding.limit(ops.block_statistics(p, splits), one.layout)
            is_clipped = tf.abs(p) > ops.spread(limit, splits)
            sums["clipped"] = tf.math.count_nonzero(is_clipped)
        # After the step, the variables hold its new state.
        for role, name in (("worker", "residual"), ("server", "server_residual")):
            leaves = _residuals(one.bucket, role)
            if leaves:
                sums[name] = sum(_square(tf.cast(v, tf.float32)) for v in leaves)
        return {name: tf.cast(value, tf.float64) for name, value in sums.items()}

    def _of_all_workers(self, vectors):
        """Returns the figures that take a sum over the workers, of a sample."""
        count = self._collectives.num_workers
        own = self._sample_of(vectors, "x")
        message = [own]
        if self._votes:
            message.append(self._sample_of(vectors, "q"))
        total = self._collectives.sum(tf.concat(message, 0), CALL_SITE)
        mean = total[: self._sampled] / count
        update = self._sample_of(vectors, "update")
        noise = own - mean if count > 1 else own
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

    def _sample_of(self, vectors, name):
        parts = []
        for one in vectors:
            begin = one.bucket.bucket_range.alignment_padding
            parts.append(getattr(one, name)[begin :: self._stride])
        return tf.concat(parts, 0)

    def _assign_histograms(self, vectors):
        for position, variable in self._histograms.items():
            rows = []
            for name in ("x", "q", "update"):
                pieces: dict = {}
                for one in vectors:
                    pieces |= one.bucket.split(getattr(one, name))
                own = sorted(piece for piece in pieces if piece.position == position)
                flat = tf.concat([tf.reshape(pieces[piece], [-1]) for piece in own], 0)
                rows.append(flat[:: _histogram_stride(flat.shape[0])])
            variable.assign(tf.stack(rows))

    # Outside of it.

    def read(self, serial: int) -> Sample | None:
        """Returns the newest sample, by local reads; None if there is none after one.

        Args:
            serial: The number of samples that are known already.
        """
        if self.serial == serial:
            return None
        # Of several devices of a process, their mean; of moments, those of the first.
        means = self._figures.local_values().mean(axis=0).tolist()
        figures = dict(zip(self.names, means, strict=True))
        row = self._row.local_values()[0]
        histograms = {
            position: variable.local_values()[0]
            for position, variable in self._histograms.items()
        }
        return Sample(
            int(row[0]),
            {name: value for name, value in figures.items() if np.isfinite(value)},
            self._moments.read(row),
            histograms,
        )

    @property
    def serial(self) -> int:
        """The number of samples so far."""
        return int(self._serial.local_values()[0])

    def _names(self):
        compressor = self._compressor
        chain = [compressor]
        while isinstance(chain[-1], Wrapper):
            chain.append(chain[-1].compressor)
        bucket = self._buckets[0]
        has = {
            "quantization_error": chain[-1].is_scaled,
            "cosine": True,
            "zero_share": True,
            "clipped_share": any(isinstance(one, Clip) for one in chain),
            "residual_norm": bool(_residuals(bucket, "worker")),
            "server_residual_norm": bool(_residuals(bucket, "server")),
            "vote_margin": self._votes,
            "tie_rate": self._votes,
            "gradient_density": True,
            "noise_density": True,
            "block_variation": True,
            "elements_sent": True,
        }
        return [name for name, there in has.items() if there]

    def _histogram_shape(self, position):
        size = sum(
            piece.end - piece.begin
            for bucket in self._buckets
            for piece in bucket.pieces
            if piece.position == position
        )
        return [len(KINDS), len(range(0, size, _histogram_stride(size)))]


class _Vectors:
    """The vectors of one bucket, in a step that is sampled.

    Attributes:
        x: This worker's mean gradient.
        p: What is rounded: `x` and what the method has kept of earlier steps.
        rounding: The part of the compressor that rounds it.
        q: What the payload stands for.
        update: The decoded reply.
    """

    def __init__(
        self,
        bucket: GradientBucket,
        compressor: Compressor,
        scale: float,
        context: Context,
        given: dict[str, Any],
    ):
        self.bucket, self.layout = bucket, bucket.layout
        x = tf.concat([tf.reshape(part, [-1]) for part in given["x"]], 0)
        self.x = x * scale
        self.rounding, self.p = _rounded(
            compressor, self.x, given["state"], self.layout, context
        )
        self.q = tf.convert_to_tensor(
            compressor.decompress(given["payload"], self.layout)
        )
        self.update = tf.concat([tf.reshape(u, [-1]) for u in given["update"]], 0)
        self.elements_sent = given["elements_sent"]


def _tensors_of(observed: ObservedBucket) -> dict[str, Any]:
    """Returns the tensors of a bucket, which a branch takes as arguments."""
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
    """Returns the part of a compressor that rounds, and what it gets.

    Momentum and residuals are added before; clipping belongs to the rounding.
    """
    while isinstance(compressor, Wrapper) and not isinstance(
        compressor, (Clip, OptimalScale)
    ):
        x = compressor.transform(x, state, layout, context)
        state = compressor.inner_state(state)
        compressor = compressor.compressor
    if isinstance(compressor, SparseCompressor):
        x += state["residual"]
    return compressor, x


def _residuals(bucket: GradientBucket, role: str) -> list:
    return [
        leaf
        for own, name, leaf in bucket.state.named_leaves()
        if own == role and name.endswith("residual")
    ]


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


def _histogram_stride(size: int) -> int:
    return max(1, -(-size // MOST_IN_HISTOGRAM)) | 1


def _variable(value, name):
    return PerReplicaVariable(value, f"compression_monitor_{name}")
