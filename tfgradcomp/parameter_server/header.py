"""The header of every message to a parameter server."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.core import Context

HEADER_WORDS = 7
"""Words of a header: the flag, the step, the seed and two learning rates."""


def write_header(flag: tf.Tensor, context: Context) -> tf.Tensor:
    """Returns the header of a worker's message, int32 `[HEADER_WORDS]`.

    Args:
        flag: int32 scalar: 0 if all is finite on the worker.
        context: The step.
    """
    return tf.concat(
        [
            flag[tf.newaxis],
            tf.bitcast(context.step, tf.int32),
            tf.bitcast(context.seed, tf.int32),
            tf.bitcast(context.learning_rate, tf.int32)[tf.newaxis],
            tf.bitcast(context.previous_learning_rate, tf.int32)[tf.newaxis],
        ],
        0,
    )


def read_header(headers: tf.Tensor, context: Context) -> tuple[tf.Tensor, Context]:
    """Returns the workers' flags, and the step from the first worker's header.

    Args:
        headers: The header of each worker, int32 `[N, HEADER_WORDS]`.
        context: Any step of these workers, for all attributes that are not in headers.
    """
    first = headers[0]
    return headers[:, 0], context.at_server()._replace(
        step=tf.bitcast(first[1:3], tf.int64),
        seed=tf.bitcast(first[3:5], tf.int64),
        learning_rate=tf.bitcast(first[5], tf.float32),
        previous_learning_rate=tf.bitcast(first[6], tf.float32),
    )
