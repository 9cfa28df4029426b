"""Layouts, gradients and steps that the contracts are checked with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfgradcomp.compressors.base import Compressed, Compressor, checked_compress
from tfgradcomp.core import Context, Layout, State
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.methods import Method
from tfgradcomp.transports import messages

# Ragged sizes: blocks of one element, around a word of 32 bits, and cut by a bucket.
LAYOUTS = {
    "one": Layout.from_sizes([1]),
    "ones": Layout.from_sizes([1, 1, 1]),
    "tensors": Layout.from_shapes(
        [(5, 7), (33,), (1,), (30,), (), (1,), (2,), (2, 2, 16), (64,)]
    ),
    "buckets": Layout.from_sizes([100, 31], 32),
    "model": Layout.from_sizes([7, 90], "model"),
}


def make_context(
    step: Any = 0,
    seed: int = 0,
    rank: Any = 0,
    num_workers: int = 1,
    rate: Any = 0.1,
    previous_rate: Any = 0.0,
    moments: Vector | None = None,
) -> Context:
    """Returns the context of a step, by default the first step of one worker."""
    return Context.at_rate_one(step, rank, num_workers, seed)._replace(
        learning_rate=tf.cast(rate, tf.float32),
        previous_learning_rate=tf.cast(previous_rate, tf.float32),
        second_moments=moments,
    )


def gradient_of(layout: Layout, seed: Any = 0) -> np.ndarray:
    """Returns a normal gradient whose blocks differ in scale, up to a thousandfold."""
    x = np.random.default_rng(seed).normal(size=layout.size).astype(np.float32)
    scales = np.float32(10.0) ** np.arange(-1, layout.num_blocks - 1).clip(-1, 2)
    return x * np.repeat(scales, np.diff(layout.row_splits)).astype(np.float32)


def second_moments_of(x: Any) -> tf.Tensor:
    """Returns sums of squares of three terms, or of a hundred that cancel."""
    x = tf.convert_to_tensor(x)
    shares = tf.where(tf.range(x.shape[0]) % 5 > 0, 1 / 3, 100.0)
    return tf.minimum(shares * x * x, 1e38)


def compress(
    compressor: Compressor,
    x: Any,
    state: State,
    layout: Layout,
    context: Context,
    reduce: Callable[[str, tf.Tensor], tf.Tensor] = lambda name, part: part,
) -> Compressed:
    """Compresses `x` after the first round, as a route does.

    `reduce` turns the name of a field of the first round and this worker's part into
    the maximum or mean over all workers.
    """
    prepared = compressor.prepare(x, state, layout, context)
    declared = compressor.first_round(layout)
    reduced = {name: reduce(name, prepared[name]) for name in declared}
    context = context._replace(prepared={**prepared, **reduced})
    return checked_compress(compressor, x, state, layout, context)


def first_step(
    compressor: Compressor, x: Any, layout: Layout, **context: Any
) -> Compressed:
    """Returns the result of a first step; `context` are those of `make_context`."""
    x = tf.convert_to_tensor(x)
    step = make_context(moments=second_moments_of(x), **context)
    return compress(compressor, x, compressor.init(layout), layout, step)


def decoded_step(
    compressor: Compressor, x: Any, layout: Layout, **context: Any
) -> tf.Tensor:
    """Returns the decoded payload of `first_step`."""
    payload = first_step(compressor, x, layout, **context).payload
    return tf.convert_to_tensor(compressor.decompress(payload, layout))


def payloads_of(
    method: Method, layout: Layout, num_workers: int
) -> dict[str, tf.Tensor]:
    """Returns the payloads of workers with different gradients, stacked."""
    compressor, state = method.compressor, method.compressor.init(layout)
    inputs = []
    for rank in range(num_workers):
        x = tf.constant(gradient_of(layout, [rank, num_workers]))
        moments = second_moments_of(x)
        context = make_context(rank=rank, num_workers=num_workers, moments=moments)
        inputs.append((x, state, layout, context))
    parts = [compressor.prepare(*each) for each in inputs]

    maxima = compressor.max_reduced_fields(layout)

    def reduce(name, part):
        over = tf.reduce_max if name in maxima else tf.reduce_mean
        return over([part[name] for part in parts], 0)

    payloads = [compress(compressor, *each, reduce).payload for each in inputs]
    stacked = {}
    for name, field in compressor.fields(layout).items():
        values = [payload[name] for payload in payloads]
        if field.variable_length:
            longest = max(value.shape[0] for value in values)
            values = [messages.padded(value, longest) for value in values]
        stacked[name] = tf.stack(values)
    return stacked
