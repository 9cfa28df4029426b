"""The vote on non-finite gradients: one word a worker, seen by all.

A status is 0 where all is finite, else 1 + the position of the first variable whose
gradient is not; 1 + the number of variables where every gradient is finite and yet a
payload is not, because half floats or a momentum overflowed.
"""

from __future__ import annotations

import tensorflow as tf


def status_of(vector, payload, gradients: dict, num_variables: int) -> tf.Tensor:
    """Returns this worker's status.

    Args:
        vector: The float32 vector that is compressed.
        payload: What became of it.
        gradients: What it is made of: tensors, or None, by the variables' positions.
        num_variables: The number of variables.
    """
    numbers = [tensor for tensor in payload.values() if tensor.dtype.is_floating]

    def locate():
        # Looked at as float32, as in the vector: 1e300 overflows there.
        bad = [
            gradient is not None
            and tf.logical_not(_is_finite(tf.cast(gradient, tf.float32)))
            for gradient in gradients.values()
        ]
        positions = tf.constant([*gradients, num_variables])
        return 1 + positions[tf.argmax(tf.stack([*bad, True]))]

    finite = tf.reduce_all([_is_finite(x) for x in [vector, *numbers]])
    return tf.cond(finite, lambda: tf.constant(0), locate)


def first_of(statuses: list[tf.Tensor]) -> tf.Tensor:
    """Joins the statuses of several exchanges: the first variable of each worker."""
    if len(statuses) == 1:
        return statuses[0]
    table = tf.stack(statuses)
    first = tf.reduce_min(tf.where(table > 0, table, table.dtype.max), axis=0)
    return tf.where(tf.reduce_any(table > 0, axis=0), first, 0)


def assertions(statuses: tf.Tensor, paths: list[str]) -> list:
    """Returns operations of which one fails, naming the variable and the worker.

    Args:
        statuses: All workers' statuses, not all 0.
        paths: Paths of the variables.
    """
    # A gradient before a payload: a scale that workers share spreads a NaN.
    seen = tf.where(statuses > 0, statuses, statuses.dtype.max)
    rank = tf.argmin(seen, output_type=tf.int32)
    places = [*(f"the gradient of {path}" for path in paths), "the compressed gradient"]
    return [
        tf.debugging.Assert(
            tf.not_equal(statuses[rank], position + 1),
            [
                f"NaN or Inf in {place}",
                "on worker",
                rank,
                "; the step was skipped on all workers and changed nothing. Lower the "
                "learning rate, clip (clipnorm=...), or go on with nonfinite='skip'",
            ],
        )
        for position, place in enumerate(places)
    ]


def _is_finite(tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(tensor))
