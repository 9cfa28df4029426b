"""Observation of a step from within: its moments and its tensors.

`Stepper.probe` is None unless a callback attaches a `Probe`, and then a traced step has
no operation more than without this module. Whatever is observed hangs off the tensors
of the step by outputs and control outputs alone: nothing that a step computes or sends
waits for an observer, and no bucket waits for another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import CollectiveCall, Collectives
from tfgradcomp.compat.clock import read_clock
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.core import Context, SplitVector, State
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.transports import Route

if TYPE_CHECKING:
    from tfgradcomp.engine.gradient_bucket import CompressedBucket, GradientBucket


class ExchangeObserver:
    """Is told by a bucket what happens in its exchange. This one ignores it."""

    # AutoGraph converts no method that has a docstring alone.

    def ready(self, gradients: list) -> None:
        """Notes that the bucket's gradients have been computed."""
        return

    def flattened(self, x: SplitVector, state: State) -> None:
        """Notes that the gradients are a vector.

        Args:
            x: The vector.
            state: The compressor's state before the step.
        """
        return

    def timed(self, route: Any) -> Any:
        """Returns a route that notes when its collectives begin and end."""
        return route

    def encoded(self, sent: CompressedBucket) -> None:
        """Notes that the payload is there."""
        return

    def exchanged(self, update: Vector) -> None:
        """Notes that the decoded reply is there, the same on all workers."""
        return


IGNORE = ExchangeObserver()


class ObservedBucket(ExchangeObserver):
    """The moments and tensors of a bucket's exchange, in one trace of a step.

    Attributes:
        bucket: The bucket.
        timestamps: Names and times of what has happened, in the order of the program:
            ready, flattened, encoded, exchanged, and for each collective
            `"enter <kind>"` and `"leave <kind>"`. float64 seconds since 1970.
        x: This worker's mean gradient.
        state: The compressor's state before the step.
        sent: What was compressed.
        update: The decoded reply.
    """

    x: SplitVector
    state: State
    sent: CompressedBucket
    update: Vector

    def __init__(self, bucket: GradientBucket):
        self.bucket = bucket
        self.timestamps: list[tuple[str, tf.Tensor]] = []

    def note(self, name: str, tensors: Any) -> None:
        """Adds the moment at which some tensors have been computed."""
        self.timestamps.append((name, time_after(tensors)))

    @override
    def ready(self, gradients):
        self.note("ready", [g for g in gradients if g is not None])

    @override
    def flattened(self, x, state):
        self.x, self.state = x, state
        self.note("flattened", list(x))

    @override
    def timed(self, route: Route) -> Route:
        route = copy.copy(route)
        route.collectives = TimedCollectives(route.collectives, self.note)
        return route

    @override
    def encoded(self, sent):
        self.sent = sent
        self.note("encoded", sent.payload)

    @override
    def exchanged(self, update):
        self.update = update
        is_split = isinstance(update, SplitVector)
        self.note("exchanged", list(update) if is_split else update)


class ObservedStep:
    """The moments and tensors of one trace of a step.

    Attributes:
        context: The step.
        is_uncompressed_step: Whether it travels as float32.
        buckets: The buckets, in their order.
        begin: When the graph of the step, or the branch with it, began to run.
        applied: When the weights were updated.
        flags: All workers' flags of gradients that are not finite, int32 `[N]`.
    """

    applied: tf.Tensor
    flags: tf.Tensor

    def __init__(self, observers: list[Observer], context: Context, is_float: bool):
        self._observers = observers
        self.context, self.is_uncompressed_step = context, is_float
        self.buckets: list[ObservedBucket] = []
        self.begin = time_after([])

    def observer_of(self, bucket: GradientBucket) -> ObservedBucket:
        """Returns the observer of a bucket's exchange."""
        self.buckets.append(ObservedBucket(bucket))
        return self.buckets[-1]

    def end(self, flags: tf.Tensor, iterations: tf.Tensor) -> None:
        """Hands the step to the observers.

        Args:
            flags: All workers' flags.
            iterations: The step counter, read after the update.
        """
        self.flags, self.applied = flags, time_after([iterations])
        for observer in self._observers:
            observer.observe(self)


class Observer(Protocol):
    """An object that is handed the steps that a `Probe` observes."""

    def observe(self, step: ObservedStep) -> None:
        """Adds to the graph what is to become of a step, in replica context.

        Whatever is computed must stand in a `conditional`, to which per-replica tensors
        go as arguments. Several local replicas share the closure of the first one.
        """


class Probe:
    """Observers of the steps of a `Stepper`, which holds it meanwhile.

    Attributes:
        observers: The observers by their names.
    """

    def __init__(self):
        self.observers: dict[str, Observer] = {}

    def begin(self, context: Context, is_uncompressed_step: bool) -> ObservedStep:
        """Begins to observe a step."""
        return ObservedStep([*self.observers.values()], context, is_uncompressed_step)


class TimedCollectives(Collectives):
    """Collectives that note the moments before and after each call.

    Args:
        collectives: What moves the vectors.
        note: Function of a name and the tensors that must be there.
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
    """Returns the time, in float64 seconds since 1970, when tensors are there.

    XLA cannot compile a clock; 0 there.
    """
    if in_xla():
        return tf.zeros([], tf.float64)
    with tf.control_dependencies(tf.nest.flatten(tensors, expand_composites=True)):
        return read_clock()
