"""The vote on non-finite gradients: one flag a worker, seen by all.

A flag is 0 where all is finite, else 1 + the position of the first variable whose
gradient is not; 1 + the number of variables where every gradient is finite and yet a
payload is not, because half floats or a momentum overflowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.compressors.base import all_finite


def flag_of(
    is_finite: tf.Tensor,
    gradients: Sequence[tf.Tensor | None],
    positions: Sequence[int],
    num_variables: int,
    scale: float,
) -> tf.Tensor:
    """Returns this worker's flag, an int32 scalar.

    Args:
        is_finite: Boolean scalar, whether gradients and payload are finite.
        gradients: The gradients that were compressed, of `IndexedSlices` the values;
            None counts as finite.
        positions: The positions of their variables.
        num_variables: The number of all variables.
        scale: What gradients are multiplied by before they are compressed.
    """

    def first_nonfinite():
        # Looked at as float32, as in the vector: 1e300 overflows there.
        bad = [
            gradient is not None
            and tf.logical_not(all_finite([scale * tf.cast(gradient, tf.float32)]))
            for gradient in gradients
        ]
        places = tf.constant([*positions, num_variables])
        return 1 + places[tf.argmax(tf.stack([*bad, True]))]

    return tf.cond(is_finite, lambda: tf.constant(0), first_nonfinite)


def first_of(flags: list[tf.Tensor]) -> tf.Tensor:
    """Joins the flags of several exchanges to the first variable of each worker."""
    if len(flags) == 1:
        return flags[0]
    table = tf.stack(flags)
    first = tf.reduce_min(tf.where(table > 0, table, table.dtype.max), axis=0)
    return tf.where(tf.reduce_any(table > 0, axis=0), first, 0)


def assertions(flags: tf.Tensor, paths: list[str]) -> list:
    """Returns operations of which one fails, naming the variable and the worker.

    Args:
        flags: All workers' flags, not all 0.
        paths: Paths of the variables.
    """
    # A gradient before a payload: a scale that workers share spreads a NaN.
    seen = tf.where(flags > 0, flags, flags.dtype.max)
    rank = tf.argmin(seen, output_type=tf.int32)
    places = [*(f"the gradient of {path}" for path in paths), "the compressed gradient"]
    return [
        tf.debugging.Assert(
            tf.not_equal(flags[rank], position + 1),
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
