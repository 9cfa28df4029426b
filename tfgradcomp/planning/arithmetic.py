"""Measurement of the time that a method's arithmetic adds to a step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.transports import AllGather, Transport
from tfgradcomp.transports.costs import (
    SimulatedCollectives,
    least_seconds,
    typical_block_size,
)

# Numbers of workers that are measured; others lie on a line through the two.
_MEASURED_WORKERS = 2, 8
# The most rows of the matrix that is measured, and its columns: more elements than fit
# into caches.
_ROWS, _COLUMNS = 1 << 13, 1 << 9
# Nanoseconds an element, for two workers and for each further worker whose payload
# every worker decodes: `python benchmarks/arithmetic.py`.
_TYPICAL = {
    "Identity": (3.2, 0.0),
    "LowRank 4": (4.5, 0.0),
    "LowRank 32": (10.4, 0.0),
    "ORQ 5": (25.0, 0.5),
    "ORQ 9": (25.0, 0.5),
    "QSGD 9": (4.2, 0.9),
    "QSGD 17": (5.0, 0.9),
    "ScaledSign": (4.8, 0.1),
    "Ternary": (2.8, 0.2),
}


def measured_arithmetic(
    kind: Callable[[Collectives], Transport],
    method: Method,
    layout: Layout,
    num_workers: int,
) -> float:
    """Returns the seconds of flattening, encoding, server, decoding and state.

    With `AllGather` every worker decodes the payloads of all workers, so the time grows
    linearly with their number. With other transports it is that of two workers.
    """
    few, many = _MEASURED_WORKERS
    rows = min(-(-layout.size // _COLUMNS), _ROWS)
    size = rows * _COLUMNS
    block_size = typical_block_size(layout)

    def seconds(count):
        with_method = _seconds(kind, method, count, rows, block_size)
        return layout.size / size * max(with_method - _plain_seconds(rows), 0.0)

    at_few = seconds(few)
    if num_workers == few or kind is not AllGather:
        return at_few
    per_worker = max(seconds(many) - at_few, 0.0) / (many - few)
    return at_few + per_worker * (num_workers - few)


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
def _seconds(kind, method, num_workers, rows, block_size):
    optimizer = CompressedOptimizer(
        keras.optimizers.SGD(0.0),
        method.compressor,
        method.server,
        weight_decay=method.weight_decay,
        block_size=block_size,
        transport=kind(SimulatedCollectives(num_workers)),
        min_size=0,
    )
    return _step_seconds(optimizer, rows)


@functools.cache
def _plain_seconds(rows):
    return _step_seconds(keras.optimizers.SGD(0.0), rows)


def _step_seconds(optimizer, rows):
    """Returns the shortest of some steps with a gradient of `rows` rows."""
    x = np.random.default_rng(0).normal(size=[rows, _COLUMNS]).astype("float32")
    gradient, variable = tf.constant(x), keras.Variable(x)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step():
        optimizer.apply([gradient], [variable])
        return optimizer.iterations.value

    return least_seconds(step)
