"""Measurement of the time that a method's arithmetic or exchange adds to a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.assignment.rules import excluded
from tfgradcomp.collectives import Collectives
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.transports import AllGather, Transport
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.costs import SimulatedCollectives, seconds_of

# Numbers of workers that are measured; others lie on a line through the two.
_MEASURED_WORKERS = 2, 8
# The most elements that are measured: more than fit into caches.
_MOST_ELEMENTS, _ROUNDS = 1 << 22, 5
# An exchange is timed for so many seconds, and at most so often.
_TIMED_SECONDS, _MOST_ROUNDS = 0.5, 20
# Nanoseconds an element, for two workers and for each further worker whose payload
# every worker decodes: `python benchmarks/arithmetic.py` on two idle cores of an Intel
# Xeon, 2026-11-25.
_TYPICAL = {
    "Identity": (0.8, 0.0),
    "LowRank 4": (0.9, 0.0),
    "LowRank 32": (1.7, 0.0),
    "ORQ 5": (5.9, 0.1),
    "ORQ 9": (12.7, 0.2),
    "QSGD 9": (1.2, 0.2),
    "QSGD 17": (2.3, 0.6),
    "ScaledSign": (0.6, 0.02),
    "Ternary": (0.35, 0.04),
}


def measured_arithmetic(
    kind: Callable[[Collectives], Transport],
    method: Method,
    layout: Layout,
    num_workers: int,
) -> float:
    """Returns the seconds of flattening, encoding, server, decoding and state.

    A step of plain SGD with the method and collectives that cost nothing, less a step
    of SGD alone, on variables of the layout's shapes. It is negative where decoding
    straight into the weights takes less time than the update that it replaces. With
    `AllGather` every worker decodes the payloads of all workers, so the time grows
    linearly with their number. With other transports it is that of two workers.
    """
    shapes = _sampled(layout.known_shapes)
    share = layout.size / sum(map(math.prod, shapes))
    few, many = _MEASURED_WORKERS

    def seconds(count):
        return share * _seconds(kind, method, count, shapes)

    at_few = seconds(few)
    if num_workers == few or kind is not AllGather:
        return at_few
    per_worker = max(seconds(many) - at_few, 0.0) / (many - few)
    return at_few + per_worker * (num_workers - few)


def _sampled(shapes):
    """Returns shapes of few elements, with small and large ones as in the model."""
    ordered = sorted(shapes, key=math.prod)
    total = sum(map(math.prod, shapes))
    every = -(-total // _MOST_ELEMENTS)
    return tuple(ordered[(len(ordered) - 1) % every :: every])


def key_of(method: Method) -> str:
    """Returns the name of a method's arithmetic: the compressor that does most of it.

    Its number of levels or its rank follows, if it has one.
    """
    part = method.compressor
    while isinstance(part, Wrapper):
        part = part.compressor
    number = getattr(part, "levels", getattr(part, "rank", ""))
    return f"{type(part).__name__} {number}".strip()


def typical_arithmetic(
    kind: Callable[[Collectives], Transport],
    method: Method,
    layout: Layout,
    num_workers: int,
) -> float:
    """Returns what `measured_arithmetic` has found on one machine, without a clock.

    Forecasts take it where nothing measured may enter.
    """
    few, per_worker = _TYPICAL[key_of(method)]
    if kind is AllGather:
        few += per_worker * (num_workers - _MEASURED_WORKERS[0])
    return 1e-9 * few * layout.size


@functools.cache
def _seconds(kind, method, num_workers, shapes):
    transport = kind(SimulatedCollectives(num_workers))
    optimizer = CompressedOptimizer(_sgd(), method, transport=transport, min_size=0)
    steps = [_step(one, shapes) for one in (optimizer, _sgd())]
    # In turns, so that other load meets both.
    times = [[seconds_of(step) for step in steps] for _ in range(_ROUNDS)]
    with_method, alone = np.min(times, axis=0)
    return float(with_method - alone)


class ExchangeTimer:
    """Times exchanges on the cluster itself, with variables like those of a model.

    All workers must create it together, and ask for the same exchanges in the same
    order. All get the same answers.

    Args:
        between: The collectives between processes.
        variables: The variables of the model that are exchanged.
        exclude: Variables that are not compressed, as the wrappers take them.
    """

    def __init__(
        self, between: Collectives, variables: Sequence, exclude: object = None
    ):
        self._between = between
        self._shapes = [tuple(variable.shape) for variable in variables]
        left_out = excluded(variables, exclude)
        self._excluded = {_name(position) for position in left_out}
        self._alone = self._seconds_of(_step(_sgd(), self._shapes))

    def seconds(self, method: Method, transport: str) -> float:
        """Returns the seconds that an exchange adds to a step, the slowest worker's.

        A step of plain SGD with the exchange, less a step of SGD alone.

        Args:
            method: The method.
            transport: The name of the transport.
        """
        optimizer = CompressedOptimizer(
            _sgd(),
            method,
            transport=BY_NAME[transport](self._between.renewed()),
            min_size=method.min_size,
            exclude=lambda variable: variable.name in self._excluded,
        )
        step = _step(optimizer, self._shapes)
        return self._seconds_of(step) - self._alone

    def _seconds_of(self, step):
        times = self._of_slowest([seconds_of(step)])
        rounds = min(int(_TIMED_SECONDS / times[0]), _MOST_ROUNDS)
        if rounds:
            times = self._of_slowest([seconds_of(step) for _ in range(rounds)])
        return float(np.median(times))

    def _of_slowest(self, seconds):
        times = tf.constant(seconds, tf.float32)
        return self._between.max(times, f"times of {len(seconds)} steps").numpy()


def _sgd():
    """Returns an optimizer that leaves the weights as they are."""
    return keras.optimizers.SGD(0.0)


def _name(position):
    return f"variable_{position}"


def _step(optimizer, shapes):
    """Returns the function of a step on variables of some shapes."""
    random = np.random.default_rng(0)
    values = [random.normal(size=shape).astype("float32") for shape in shapes]
    gradients = [tf.constant(value) for value in values]
    variables = [keras.Variable(v, name=_name(i)) for i, v in enumerate(values)]
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step():
        optimizer.apply(gradients, variables)
        return optimizer.iterations.value

    step()
    return step
