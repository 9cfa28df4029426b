"""A bucket of a worker with several devices: each device exchanges a part of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfgradcomp.collectives import Devices
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core import Layout
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine import nonfinite
from tfgradcomp.engine.bucket_ranges import BucketRange
from tfgradcomp.engine.flat_vectors import FlatVector
from tfgradcomp.engine.gradient_bucket import GradientBucket, Operands
from tfgradcomp.engine.probe import IGNORE, ExchangeObserver
from tfgradcomp.engine.segment import Segment
from tfgradcomp.engine.step_records import BucketResult, Gradients, StepInputs
from tfgradcomp.ops.reference.vectors import zero_padded
from tfgradcomp.transports import Route

# Parts begin at a multiple of so many elements.
ALIGNMENT = 4


def part_ranges(
    whole: BucketRange, devices: int, edges: Sequence[int] | None = None
) -> list[BucketRange]:
    """Returns the range of each device: equal parts, rounded to four elements.

    Where that leaves a device without an element, each has the whole range.

    Args:
        whole: The range of the bucket.
        devices: Number of devices.
        edges: Where the range may be cut; the nearest ones are taken. None: anywhere.
    """
    size = whole.end - whole.begin
    cuts = [whole.begin + size * device // devices for device in range(1, devices)]
    if edges is None:
        cuts = [-(-cut // ALIGNMENT) * ALIGNMENT for cut in cuts]
    else:
        cuts = [min(edges, key=lambda edge: abs(edge - cut)) for cut in cuts]
    pairs = list(itertools.pairwise([whole.begin, *cuts, whole.end]))
    if any(begin >= end for begin, end in pairs):
        pairs = [(whole.begin, whole.end)] * devices
    return [BucketRange(begin, end) for begin, end in pairs]


class StatePart:
    """Part of a vector of state, as a device holds it: the head of a variable.

    A variable has one size on all devices, and parts differ by a few elements.

    Attributes:
        initial: The first value.
        variable: The variable, once there is one.
    """

    variable: PerReplicaVariable

    def __init__(self, initial: tf.Tensor, name: str):
        self.initial = initial

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the value, where TensorFlow wants a tensor."""
        return tf.convert_to_tensor(self.variable)[: self.initial.shape[0]]

    def padded(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value of the size that the variable has."""
        return zero_padded(tf.convert_to_tensor(value), self.variable.shape[0])


class DeviceShardedBucket(Segment):
    """A segment whose parts are exchanged by one device of the worker each.

    The gradient is the mean over the worker's devices. Device k takes part k of it,
    compresses the part and exchanges it with device k of the other workers. Then the
    decoded updates are gathered inside the worker.

    Attributes:
        parts: The bucket of each device.
        route: The route of the first part, whose method and transport all have.
        is_compressed: Whether the method compresses.
        has_variable_length: Whether the messages vary in length.
        state: The variables of the state; each device holds that of its own part.
    """

    takes_rows, can_batch = False, False

    def __init__(
        self,
        vector: FlatVector,
        bucket_range: BucketRange,
        name: str,
        parts: tuple[GradientBucket, ...],
        devices: Devices,
    ):
        """Creates the variables of the state.

        Args:
            vector: The flat vector.
            bucket_range: The range of the vector.
            name: Name of the bucket.
            parts: The bucket of each device, with `StatePart`s for variables.
            devices: The worker's devices.
        """
        # The whole needs no padding: sums and random numbers are those of the parts.
        bucket_range = bucket_range._replace(alignment=1)
        sizes = [end - begin for _, begin, end in vector.pieces(bucket_range)]
        super().__init__(vector, name, bucket_range, Layout.from_sizes(sizes))
        first, ranges = parts[0], [part.bucket_range for part in parts]
        self.parts = parts
        self.route, self.is_compressed = first.route, first.is_compressed
        self.has_variable_length = first.has_variable_length
        self._devices = devices
        self._is_cut = ranges[0] != ranges[-1]
        self._slices = [
            slice(one.begin - bucket_range.begin, one.end - bucket_range.begin)
            for one in ranges
        ]
        self._widest = max(part.size for part in self.parts)
        leaves = zip(*(tf.nest.flatten(part.state) for part in self.parts), strict=True)
        names = [f"{name}.{leaf.name}" for leaf in first.leaves]
        variables = list(map(_variable, names, leaves))
        self.state = tf.nest.pack_sequence_as(first.state, variables)

    @property
    def declared_routes(self) -> list[Route]:
        """The routes whose traffic is known before a step."""
        return [part.route for part in self.parts]

    def operands(
        self,
        step: StepInputs,
        route_of: Callable[[GradientBucket], Route],
        observer: ExchangeObserver,
    ) -> Operands:
        """Returns the operands of this device: a part of the worker's mean gradient.

        Raises:
            ValueError: If the step is observed.
        """
        if observer is not IGNORE:
            raise ValueError(
                "CompressionMonitor and Timeline observe workers of one device. Train "
                "without them where a worker has several. Received: "
                f"devices of a worker={self._devices.per_worker}"
            )
        part = self.parts[self._devices.inside.rank]
        own = self._reduced(step.gradients, part)
        return part.operands(step._replace(gradients=own), route_of, observer)

    def with_gradients(self, positions: Collection[int]) -> DeviceShardedBucket:
        """Returns this bucket for steps in which some of its variables wait."""
        bucket = copy.copy(self)
        bucket.parts = tuple(part.with_gradients(positions) for part in self.parts)
        bucket.route = bucket.parts[0].route
        return bucket

    def _reduced(self, gradients: Gradients, part: GradientBucket) -> Gradients:
        """Returns a part of the worker's mean gradient, and of its second moments."""
        vector = self.flatten(gradients.values, gradients.scale)
        values = self._sum_inside(vector, "gradients") / self._devices.per_worker
        moments = []
        if part.route.method.compressor.needs_second_moments:
            # A term of the mean is a term of a device over their number.
            total = self._sum_inside(self.second_moments(gradients), "moments")
            moments = _by_position(total / self._devices.per_worker**2, part, gradients)
        return Gradients(_by_position(values, part, gradients), moments=moments)

    def _sum_inside(self, vector: Vector, what: str) -> tf.Tensor:
        """Returns this device's part of the sum over the worker's devices."""
        inside, call_site = self._devices.inside, f"{self.name}/{what}"
        vector = tf.convert_to_tensor(vector)
        if not self._is_cut:
            return tf.reduce_sum(inside.gather(vector, call_site), axis=0)
        rows = tf.stack(
            [zero_padded(vector[own], self._widest) for own in self._slices]
        )
        came = tf.reshape(inside.all_to_all(rows, call_site), rows.shape)
        return tf.reduce_sum(came, axis=0)[: self.parts[inside.rank].size]

    def completed(self, result: BucketResult, operands: Operands) -> BucketResult:
        """Returns the result for the whole bucket, gathered inside the worker."""
        part = operands.bucket
        result = part.completed(result, operands)
        state = tf.nest.map_structure(StatePart.padded, part.state, result.state)
        result = result._replace(state=state)
        if not self._is_cut:
            return result
        flags = result.nonfinite_flags
        update = tf.convert_to_tensor(result.update)[-part.size :]
        # Bit patterns: integers carry floats and counts alike.
        message = tf.concat(
            [
                flags,
                tf.cast([result.elements_sent, result.variable_length_words], tf.int32),
                tf.bitcast(zero_padded(update, self._widest), tf.int32),
            ],
            0,
        )
        rows = self._devices.inside.gather(message, f"{self.name}/update")
        count = flags.shape[0]
        updates = [
            row[count + 2 : count + 2 + one.size]
            for row, one in zip(tf.unstack(rows), self.parts, strict=True)
        ]
        return BucketResult(
            tf.bitcast(tf.concat(updates, 0), tf.float32),
            state,
            nonfinite.first_of(tf.unstack(rows[:, :count])),
            tf.reduce_sum(rows[:, count]),
            tf.reduce_sum(rows[:, count + 1]),
        )


Bucket = GradientBucket | DeviceShardedBucket


def _by_position(vector, part, gradients):
    """Returns a part's vector as a list over all variables: what it has of each."""
    values: list[tf.Tensor | None] = [None] * len(gradients.values)
    sizes = [end - begin for _, begin, end in part.pieces]
    for piece, value in zip(part.pieces, tf.split(vector, sizes), strict=True):
        values[piece.position] = value
    return values


def _variable(name: str, parts: tuple[StatePart, ...]) -> PerReplicaVariable:
    """Creates the variable of a leaf of the state, of the size of the longest part."""
    longest = max((part.initial for part in parts), key=lambda one: one.shape[0])
    variable = PerReplicaVariable.known(longest, name)
    for part in parts:
        part.variable = variable
    return variable
