r"""Errors that methods make in the mean gradient of each layer.

Worker i sends \( Q(g_i) = g_i + e_i \) with an error of its own, so the mean of N
unbiased messages has the error \( \frac{1}{N^2} \sum_i |e_i|^2 \). A quantized reply
adds the error of the mean's rounding. Both are measured on gradients of one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.collectives import SingleWorker
from tfgradcomp.compressors import Compressor, MeanErrorFeedback
from tfgradcomp.compressors.base import checked_compress, checked_prepare
from tfgradcomp.core import Context, Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import FactorMean, Requantize
from tfgradcomp.transports import AllReduce

# Steps in which PowerSGD's factors come near to those of a gradient.
_POWER_STEPS = 3
_TINY = 1e-30


class Gradients(NamedTuple):
    """The gradients of a step, joined to flat float32 vectors.

    Attributes:
        own: This worker's.
        mean: The mean over the workers.
        names: The name of each variable.
        shapes: The shape of each variable.
    """

    own: tf.Tensor
    mean: tf.Tensor
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class WorstLayer(NamedTuple):
    """The largest error of a layer's mean gradient, over its length.

    Attributes:
        error: The error.
        layer: The name of the layer's variable.
    """

    error: float
    layer: str


def squared_lengths(vector: tf.Tensor, shapes: Iterable[Sequence[int]]) -> tf.Tensor:
    """Returns the squared length of each tensor's part of a vector, float64."""
    splits = Layout.from_shapes(shapes).row_splits
    return ops.block_statistics(vector, splits, ("sum_of_squares",)).sum_of_squares


def squared_errors(
    method: Method, own: tf.Tensor, mean: tf.Tensor, shapes: Sequence[Sequence[int]]
) -> tf.Tensor:
    """Returns the squared errors of each tensor, float64 `[2, tensors]`.

    The first row has the error of this worker's message, the second that of the reply.
    Error feedback does not count: what it keeps is sent later.

    Args:
        method: The method. Except for PowerSGD, its compressor has no state.
        own: This worker's gradient, a flat float32 vector.
        mean: The mean gradient.
        shapes: The shapes of the tensors that the vectors are made of.
    """
    layout = Layout.from_shapes(shapes, method.block_size)
    compressor, server = method.compressor, method.server
    zeros = tf.zeros([len(shapes)], tf.float64)
    if isinstance(compressor, MeanErrorFeedback):
        # Both rounds are means of what is linear: the messages have no other error.
        inner = Method(compressor.compressor, server)
        update = _low_rank(inner, mean, layout)
        return tf.stack([zeros, squared_lengths(update - mean, shapes)])
    sent = _decoded(compressor, own, layout, rank=0)
    reply = zeros
    if isinstance(server, Requantize):
        decoded = _decoded(server.compressor, mean, layout, rank=1)
        reply = squared_lengths(decoded - mean, shapes)
    return tf.stack([squared_lengths(sent - own, shapes), reply])


def worst_layer(
    own: np.ndarray, reply: np.ndarray, mean: np.ndarray, workers: int, names: Sequence
) -> WorstLayer:
    """Returns the largest error of a layer.

    Args:
        own: Squared errors of the messages, their sum over the workers, by layers.
        reply: Squared errors of the reply.
        mean: Squared lengths of the mean gradient.
        workers: N.
        names: The names of the layers.
    """
    ratios = np.sqrt((own / workers**2 + reply) / np.maximum(mean, _TINY))
    worst = int(ratios.argmax())
    return WorstLayer(float(ratios[worst]), names[worst])


def _decoded(compressor: Compressor, x, layout, rank):
    """Returns what a stateless compressor makes of a vector."""
    context = Context.at_rate_one(rank=rank)
    prepared = checked_prepare(compressor, x, (), layout, context)
    context = context._replace(prepared=prepared)
    sent = checked_compress(compressor, x, (), layout, context)
    return tf.convert_to_tensor(compressor.decompress(sent.payload, layout))


def _low_rank(method, x, layout):
    """Returns the update by factors that have followed a vector for some steps."""
    route = AllReduce(SingleWorker()).bind(method, layout, "layer errors")
    state, server_state = method.compressor.init(layout), route.init_state()
    for step in range(_POWER_STEPS if isinstance(method.server, FactorMean) else 1):
        context = Context.at_rate_one(step)
        sent, context = route.compress(x, state, server_state, context)
        flag = tf.constant(0)
        result = route.exchange(sent.payload, server_state, context, flag)
        server_state = result.state
    return tf.convert_to_tensor(result.update)
