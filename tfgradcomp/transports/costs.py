"""Estimates of an exchange's duration, from measured collectives and arithmetic."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import CollectiveCall, Collectives, SingleWorker
from tfgradcomp.core import Context, Layout
from tfgradcomp.methods import Method
from tfgradcomp.transports.base import Transport

_PROBE_WORDS = 64, 1 << 15, 1 << 17, 1 << 19
_PROBE_SECONDS = 0.01
_PROBE_SHAPES = (1 << 8, 1 << 9), (1 << 10, 1 << 10)
_ROUNDS = 5


class LinearCost(NamedTuple):
    """Seconds of a collective: `latency + words * per_word`.

    Attributes:
        latency: Seconds, independent of the size.
        per_word: Seconds for each 32-bit word of a worker's message.
    """

    latency: float
    per_word: float


class Costs(NamedTuple):
    """Durations of a cluster's collectives for its number of workers.

    Attributes:
        gather: Of a vector from each worker.
        all_to_all: Of a row from each worker to each worker.
        sum: Of the sum of a vector; a maximum is assumed to take as long.
    """

    gather: LinearCost
    all_to_all: LinearCost
    sum: LinearCost

    def seconds(self, calls: list[CollectiveCall]) -> float:
        """Returns the duration of several collectives, one after the other."""
        total = 0.0
        for call in calls:
            cost = getattr(self, "sum" if call.kind == "max" else call.kind)
            total += cost.latency + cost.per_word * call.words
        return total


class SimulatedCollectives(SingleWorker):
    """N workers that all send the same values, to measure the arithmetic alone."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers

    @override
    def gather(self, vector, call_site):
        return tf.stack([vector] * self.num_workers)


@functools.cache
def measure(collectives: Collectives) -> Costs:
    """Measures the collectives on the cluster, once; all workers must call it.

    Vectors grow until a collective takes a hundredth of a second, because buffers on
    the way hide the cost of small vectors. At 100 Mbit/s this takes half a second.
    """
    num_workers = collectives.num_workers

    def seconds(kind, words):
        words = -(-words // num_workers) * num_workers
        shape = [num_workers, words // num_workers] if kind == "all_to_all" else [words]
        vector = tf.zeros(shape, tf.int32)
        collective, call_site = getattr(collectives, kind), f"measure/{words}"
        local = least_seconds(lambda: collective(vector, call_site))
        # All workers must stop at the same size, so the slowest one decides.
        return float(collectives.max(tf.constant([local]), "measure/seconds")[0])

    def cost(kind):
        few, *more = _PROBE_WORDS
        latency = high = seconds(kind, few)
        for many in more:
            low, high = high, seconds(kind, many)
            per_word = max(high - low, 0.0) / (many - few)
            few = many
            if high > _PROBE_SECONDS:
                break
        return LinearCost(latency, per_word)

    return Costs(*(cost(kind) for kind in Costs._fields))


def route_seconds(
    kind: Callable[[Collectives], Transport],
    method: Method,
    layout: Layout,
    num_workers: int,
    costs: Costs,
) -> float:
    """Returns the estimated duration of an exchange: collectives and arithmetic.

    Args:
        kind: The class of the transport.
        method: The method.
        layout: The blocks of the flat vector.
        num_workers: N.
        costs: Durations of the collectives.
    """
    collectives = SimulatedCollectives(num_workers)
    calls = kind(collectives).bind(method, layout, "estimate").calls
    block_size = typical_block_size(layout)
    per_element = _seconds_per_element(kind, method, num_workers, block_size)
    return costs.seconds(calls) + per_element * layout.size


def typical_block_size(layout: Layout) -> int:
    """Returns the size of the block of the middle element, at most a probe's size."""
    middle = layout.blocks_in(layout.size // 2, layout.size // 2 + 1).start
    width = layout.row_splits[middle + 1] - layout.row_splits[middle]
    return min(width, math.prod(_PROBE_SHAPES[0]))


@functools.cache
def _seconds_per_element(kind, method, num_workers, block_size):
    """Measures encoding, the server's rule and decoding on this machine, once."""
    context = Context.at_rate_one(num_workers=num_workers)

    def seconds(shape):
        layout, size = Layout.from_shapes([shape], block_size), math.prod(shape)
        collectives = SimulatedCollectives(num_workers)
        route = kind(collectives).bind(method, layout, "probe")
        x = tf.constant(np.random.default_rng(0).normal(size=size), tf.float32)
        state = route.method.compressor.init(layout)
        server_state = route.init_state()

        def step():
            sent, step_context = route.compress(x, state, server_state, context)
            flag = tf.constant(0)
            return route.exchange(sent.payload, server_state, step_context, flag)

        return least_seconds(step)

    low, high = map(seconds, _PROBE_SHAPES)
    few, many = map(math.prod, _PROBE_SHAPES)
    # Load on the machine during the shorter probe must not reduce the cost to zero.
    return max(high - low, high / 8) / (many - few)


def least_seconds(function: Callable) -> float:
    """Returns the shortest duration of several calls, after one call for warm-up."""
    function()
    # Other load on the machine makes calls longer, never shorter.
    return min(seconds_of(function) for _ in range(_ROUNDS))


def seconds_of(function: Callable) -> float:
    """Returns the duration of a call, until its first result is there."""
    began = time.perf_counter()
    tf.nest.flatten(function())[0].numpy()
    return time.perf_counter() - began
