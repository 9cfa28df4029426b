"""Observation of a step from within: its timestamps and its tensors.

A step without `Stepper.observers` has no operation more than without this module.
Observers read the tensors of a step, by outputs and control outputs alone: the step
waits for no observer, and no bucket waits for another bucket.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import CollectiveCall, Collectives
from tfgradcomp.compat.clock import read_clock
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.core import Context, SplitVector, State
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine.segment import Segment
from tfgradcomp.engine.step_records import CompressedBucket


class ExchangeObserver:
    """Observes the exchange of a bucket. This class ignores whatever happens."""

    # AutoGraph cannot convert a method that consists of a docstring.

    def note(self, name: str, tensors: Any) -> None:
        """Notes an event: some tensors have been computed."""
        return

    def timed(self, route: Any) -> Any:
        """Returns a route that notes when its collectives begin and end."""
        return route

    def exchanged(
        self, x: SplitVector, state: State, sent: CompressedBucket, update: Vector
    ) -> None:
        """Notes that the decoded reply has been computed.

        Args:
            x: This worker's mean gradient.
            state: The compressor's state before the step.
            sent: The compressed bucket.
            update: The decoded reply, the same on all workers.
        """
        return


IGNORE = ExchangeObserver()


class ObservedBucket(ExchangeObserver):
    """The timestamps and tensors of a bucket's exchange, in one trace of a step.

    Attributes:
        bucket: The bucket.
        timestamps: Names and times of all events, in the order of the program: ready,
            flattened, encoded, exchanged, and for each collective `"enter <kind>"` and
            `"leave <kind>"`. float64 seconds since 1970.
        x: This worker's mean gradient.
        state: The compressor's state before the step.
        sent: The compressed bucket.
        update: The decoded reply.
    """

    x: SplitVector
    state: State
    sent: CompressedBucket
    update: Vector

    def __init__(self, bucket: Segment):
        self.bucket = bucket
        self.timestamps: list[tuple[str, tf.Tensor]] = []

    @override
    def note(self, name, tensors):
        self.timestamps.append((name, time_after(tensors)))

    @override
    def timed(self, route):
        route = copy.copy(route)
        route.collectives = TimedCollectives(route.collectives, self.note)
        return route

    @override
    def exchanged(self, x, state, sent, update):
        self.x, self.state, self.sent, self.update = x, state, sent, update
        is_split = isinstance(update, SplitVector)
        self.note("exchanged", list(update) if is_split else update)


class ObservedStep:
    """The timestamps and tensors of one trace of a step.

    Attributes:
        context: The step.
        is_uncompressed_step: Whether the gradients travel as float32.
        buckets: The buckets, in their order.
        begin: When the graph of the step, or the branch with it, began to run.
        applied: When the weights were updated.
        flags: All workers' flags of gradients that are not finite, int32 `[N]`.
    """

    applied: tf.Tensor
    flags: tf.Tensor

    def __init__(
        self, buckets: Iterable[Segment], context: Context, is_uncompressed_step: bool
    ):
        self.context, self.is_uncompressed_step = context, is_uncompressed_step
        self.buckets = [ObservedBucket(bucket) for bucket in buckets]
        self.begin = time_after([])

    def end(
        self, observers: Iterable[Observer], flags: tf.Tensor, iterations: tf.Tensor
    ) -> None:
        """Hands the step to observers; `iterations` is read after the update."""
        self.flags, self.applied = flags, time_after([iterations])
        for observer in observers:
            observer.observe(self)


class Observer(Protocol):
    """Receives the steps of a `Stepper`.

    Attributes:
        needs_all_buckets: Whether buckets without any gradient take part as well.
    """

    needs_all_buckets: bool

    def observe(self, step: ObservedStep) -> None:
        """Adds its own operations to the graph of a step, in replica context.

        All computations must stand in a `conditional`, to which per-replica tensors go
        as arguments. Several local replicas share the closure of the first replica.
        """


class TimedCollectives(Collectives):
    """Collectives that note the times before and after each call.

    Args:
        collectives: The collectives that move the vectors.
        note: Function of a name and the tensors that must have been computed.
    """

    def __init__(self, collectives: Collectives, note: Callable):
        self._collectives, self._note = collectives, note
        self.num_workers = collectives.num_workers
        self.process_index = collectives.process_index
        self.num_processes = collectives.num_processes

    @property
    @override
    def rank(self):
        return self._collectives.rank

    @override
    def words_sent(self, call: CollectiveCall) -> float:
        return self._collectives.words_sent(call)

    @override
    def gather(self, vector, call_site):
        return self._timed("gather", vector, call_site)

    @override
    def all_to_all(self, rows, call_site):
        return self._timed("all_to_all", rows, call_site)

    @override
    def sum(self, vector, call_site):
        return self._timed("sum", vector, call_site)

    @override
    def max(self, vector, call_site):
        return self._timed("max", vector, call_site)

    def _timed(self, kind, vector, call_site):
        self._note(f"enter {kind}", [vector])
        result = getattr(self._collectives, kind)(vector, call_site)
        self._note(f"leave {kind}", [result])
        return result


def time_after(tensors: Any) -> tf.Tensor:
    """Returns the time, in float64 seconds since 1970, when tensors are computed.

    XLA cannot compile a clock: the time is 0 there.
    """
    if in_xla():
        return tf.zeros([], tf.float64)
    # Variables without a gradient have no tensor.
    flat = tf.nest.flatten(tensors, expand_composites=True)
    with tf.control_dependencies([one for one in flat if one is not None]):
        return read_clock()
