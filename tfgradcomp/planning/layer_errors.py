r"""Errors that methods make in the mean gradient of each layer.

Worker i sends \( Q(g_i) = g_i + e_i \) with an error of its own, so the mean of N
unbiased messages has the error \( \frac{1}{N^2} \sum_i |e_i|^2 \). A quantized reply
adds the error of the mean's rounding. Both are measured on gradients of one step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import SingleWorker
from tfgradcomp.compressors import Compressor, MeanErrorFeedback
from tfgradcomp.compressors.base import checked_compress, checked_prepare
from tfgradcomp.core import Context, Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import FactorMean, Requantize
from tfgradcomp.transports import AllReduce

# Steps in which PowerSGD's factors come near to those of a gradient.
_POWER_STEPS = 3


class Gradients(NamedTuple):
    """The gradients of a step, joined to flat float32 vectors.

    Attributes:
        own: This worker's.
        mean: The mean over the workers.
        names: The name of each variable.
        shapes: The shape of each variable.
    """

    own: np.ndarray
    mean: np.ndarray
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def squares(self, vector: np.ndarray) -> np.ndarray:
        """Returns the squared length of each variable's part of a vector, float64."""
        begins = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])[:-1]
        return np.add.reduceat(np.square(vector.astype(np.float64)), begins)


def squared_errors(method: Method, gradients: Gradients) -> tuple[np.ndarray, ...]:
    """Returns the squared errors of each variable, float64 `[variables]` twice.

    Args:
        method: The method. Error feedback does not count: what it keeps is sent later.
        gradients: The gradients of a step.

    Returns:
        The error of this worker's message, and that of the reply to the mean.
    """
    layout = Layout.from_shapes(gradients.shapes, method.block_size)
    nothing = np.zeros(len(gradients.shapes))
    compressor, server = method.compressor, method.server
    if isinstance(compressor, MeanErrorFeedback):
        # Both rounds are means, so the messages as such have no error.
        compressor = compressor.compressor
        update = _low_rank(Method(compressor, server), gradients.mean, layout)
        return nothing, gradients.squares(update - gradients.mean)
    own = _decoded(compressor, gradients.own, layout, rank=0) - gradients.own
    reply = nothing
    if isinstance(server, Requantize):
        decoded = _decoded(server.compressor, gradients.mean, layout, rank=1)
        reply = gradients.squares(decoded - gradients.mean)
    return gradients.squares(own), reply


def _decoded(compressor: Compressor, vector, layout, rank) -> np.ndarray:
    """Returns what a stateless compressor makes of a vector."""
    x, context = tf.constant(vector), _context(rank)
    prepared = checked_prepare(compressor, x, (), layout, context)
    context = context._replace(prepared=prepared)
    sent = checked_compress(compressor, x, (), layout, context)
    return np.asarray(compressor.decompress(sent.payload, layout))


def _low_rank(method, vector, layout) -> np.ndarray:
    """Returns the update by factors that have followed a vector for some steps."""
    route = AllReduce(SingleWorker()).bind(method, layout, "layer errors")
    state, server_state = method.compressor.init(layout), route.init_state()
    x = tf.constant(vector)
    for step in range(_POWER_STEPS if isinstance(method.server, FactorMean) else 1):
        context = _context(0)._replace(step=tf.constant(step, tf.int64))
        sent, context = route.compress(x, state, server_state, context)
        flag = tf.constant(0)
        result = route.exchange(sent.payload, server_state, context, flag)
        server_state = result.state
    return np.asarray(result.update)


def _context(rank: int) -> Context:
    zero, one = tf.constant(0, tf.int64), tf.constant(1.0)
    return Context(
        step=zero,
        seed=zero,
        rank=rank,
        num_workers=1,
        learning_rate=one,
        previous_learning_rate=one,
    )
