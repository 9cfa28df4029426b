"""The vote on non-finite gradients: one word a worker, seen by all.

A status is 0 where all is finite, else 1 + the position of the first variable whose
gradient is not; 1 + the number of variables where every gradient is finite and yet a
payload is not, because half floats or a momentum overflowed.
"""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.compressors.base import all_finite


def locate(gradients: dict, num_variables: int, scale: float) -> tf.Tensor:
    """Returns this worker's status where something is not finite.

    Args:
        gradients: What is compressed: tensors, or None, by the variables' positions.
        num_variables: The number of variables.
        scale: What gradients are multiplied by before they are compressed.
    """
    # Looked at as float32, as in the vector: 1e300 overflows there.
    bad = [
        gradient is not None
        and tf.logical_not(all_finite([scale * tf.cast(gradient, tf.float32)]))
        for gradient in gradients.values()
    ]
    positions = tf.constant([*gradients, num_variables])
    return 1 + positions[tf.argmax(tf.stack([*bad, True]))]


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
