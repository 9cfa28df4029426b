"""Contracts of exchanges between workers that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives, Loopback
from tfgradcomp.core import Layout
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine.probe import TimedCollectives
from tfgradcomp.methods import Method
from tfgradcomp.testing.errors import require, require_same_bits
from tfgradcomp.testing.inputs import make_context
from tfgradcomp.transports import DirectExchange, Route, Transport, messages
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.auto import BY_NAME, supported_names

MakeTransport = Callable[[Collectives], Transport]
"""The class of a transport, or a function of a worker's collectives."""

# Sums of half floats, each of them rounded, are within this part of the largest.
_SUM_TOLERANCE = 0.05


class RecordingCollectives(TimedCollectives):
    """Collectives that pass calls on, and record each call's kind and bytes."""

    def __init__(self, collectives: Collectives):
        super().__init__(collectives, self._record)
        self.calls: list[tuple[str, int]] = []

    def _record(self, note, tensors):
        event, kind = note.split()
        if event == "enter":
            (vector,) = tensors
            self.calls.append((kind, vector.shape.num_elements() * vector.dtype.size))


class WorkerRun(NamedTuple):
    """The steps of one worker.

    Attributes:
        steps: The update of each step, and the vectors of the server's state that this
            worker holds.
        calls: The kind and the bytes of each collective.
        variable_length_words: Words of the messages whose length varies.
        route: The worker's route.
    """

    steps: list[tuple[np.ndarray, list[np.ndarray]]]
    calls: list[tuple[str, int]]
    variable_length_words: int
    route: Route


def flag_of(rank: int, step: int) -> int:
    """Returns flags over the whole of their range, [0, 2**24)."""
    return (0, 2**24 - 1, 1, 2**16, 255 + 256 * 3)[(rank + step) % 5]


def moments_of(x: Vector, rank: int, step: int) -> tf.Tensor:
    """Returns second moments by which workers are sure of some elements, or none."""
    unsure = np.random.default_rng([rank, step]).random(x.shape[0])
    return (unsure + (step == 1) * rank) * tf.square(x)


def run(
    num_workers: int,
    transport: MakeTransport,
    method: Method,
    layout: Layout,
    steps: int = 2,
) -> list[WorkerRun]:
    """Takes steps on workers that have different gradients."""

    def worker(rank, collectives):
        recording = RecordingCollectives(collectives)
        route = transport(recording).bind(method, layout, "site")
        rng = np.random.default_rng(rank)
        state, server_state = route.method.compressor.init(layout), route.init_state()
        seen, words = [], 0
        for step in range(steps):
            rate = 0.1 if step else 0.0
            context = make_context(step, 4, rank, num_workers, previous_rate=rate)
            x = tf.constant(rng.normal(size=layout.size), tf.float32)
            context = context._replace(second_moments=moments_of(x, rank, step))
            sent, context = route.compress(x, state, server_state, context)
            flag = tf.constant(flag_of(rank, step))
            result = route.exchange(sent.payload, server_state, context, flag)
            state = route.received(sent.state, result, context)
            server_state = result.state
            sent_flags = [flag_of(other, step) for other in range(num_workers)]
            flags, expected = result.nonfinite_flags, np.array(sent_flags, np.int32)
            require_same_bits("received and sent flags", flags, expected)
            held = [leaf.numpy() for leaf in tf.nest.flatten(server_state)]
            seen.append((np.asarray(result.update), held))
            words += int(result.variable_length_words)
        return WorkerRun(seen, recording.calls, words, route)

    return Loopback(num_workers).run(worker)


def exchanges_give_the_bits_of_a_direct_exchange(
    method: Method,
    layout: Layout,
    num_workers: int,
    transports: Mapping[str, MakeTransport] | None = None,
) -> None:
    """Checks updates, the server's state, and that no more moves than declared.

    The default `transports`, by name, are all that carry the method.
    """
    if transports is None:
        alone = Loopback(num_workers).collectives(0)
        names = supported_names(method, layout, alone)
        transports = {name: BY_NAME[name] for name in names}
    direct = run(num_workers, DirectExchange, method, layout)[0].steps
    fields = method.compressor.fields(layout)
    for name, transport in transports.items():
        runs = run(num_workers, transport, method, layout)
        for worker in runs:
            _check_calls(worker, runs[0], messages.has_variable_length(fields))
        # A ring adds numbers in another order.
        is_sum = transport is AllReduce and all(f.base is None for f in fields.values())
        for step, (update, state) in enumerate(direct):
            if is_sum:
                error = np.abs(runs[0].steps[step][0] - update).max()
                require(
                    error <= _SUM_TOLERANCE * np.abs(update).max(),
                    f"a mean by {name} must be close to a direct one. "
                    f"Received: error={error}",
                )
                update, state = runs[0].steps[step]
            what = f"in step {step}, the updates by {name} and by a direct exchange"
            for worker in runs:
                require_same_bits(what, worker.steps[step][0], update)
            _check_states(name, runs, step, state)


def _check_states(name, runs, step, state):
    route = runs[0].route
    for index, whole in enumerate(state):
        held = [worker.steps[step][1][index] for worker in runs]
        what = f"the server's state that {name} saves and that of a direct exchange"
        require_same_bits(what, route.to_whole(held), whole)
        restored = [route.from_whole(whole, rank) for rank in range(len(runs))]
        what = f"the server's state that {name} restores and the state that it holds"
        require_same_bits(what, restored, held)


def _check_calls(worker, first, is_variable):
    declared = [(call.kind, 4 * call.words) for call in worker.route.calls]
    calls = [(kind, -(-size // 4) * 4) for kind, size in worker.calls]
    # Each call is followed by a gather of a size that varies.
    variable = calls[1::2] if is_variable else []
    fixed = calls[::2] if is_variable else calls
    require(
        fixed == len(worker.steps) * declared,
        f"the collectives of a step must be {declared}, by kind and bytes, as `calls` "
        f"declares. Received: calls={fixed}",
    )
    words, others = worker.variable_length_words, first.calls[1::2]
    is_gathered = {kind for kind, _ in variable} <= {"gather"}
    require(
        is_gathered and sum(size for _, size in variable) == 4 * words,
        f"{words} words of varying messages must be gathered. Received: {variable}",
    )
    require(
        not variable or variable == others,
        "varying messages must be padded to one size on all workers. "
        f"Received: {variable} and {others}",
    )
