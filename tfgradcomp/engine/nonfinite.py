"""The vote on non-finite gradients: each worker's flag, which all workers see.

A flag is 0 where all values are finite, otherwise 1 + the position of the first
variable with a non-finite gradient. It is 1 + the number of variables if all gradients
are finite and the payload is not, because half floats or a momentum overflowed.

A notice, which a worker may have for the others, travels as a higher bit of the flag.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.collectives import Collectives
from tfgradcomp.compressors.base import all_finite
from tfgradcomp.core.split_vector import SplitVector
from tfgradcomp.engine.dense import multiplied

# Larger than all flags, and a flag is less than 2**24.
_NOTICE = 2**23


def with_notice(flag: tf.Tensor, notice: tf.Tensor | None) -> tf.Tensor:
    """Returns a flag that carries a notice, 0 or 1, if there is one."""
    return flag if notice is None else flag + _NOTICE * notice


def without_notices(flags: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all workers' flags alone, and the largest of their notices."""
    return flags % _NOTICE, tf.reduce_max(flags // _NOTICE)


def flag_of(
    is_finite: tf.Tensor, x: SplitVector, places: Sequence[int], num_variables: int
) -> tf.Tensor:
    """Returns this worker's flag, an int32 scalar.

    Args:
        is_finite: Boolean scalar, whether gradients and payload are finite.
        x: The vector that was compressed.
        places: The position of the variable of each tensor of `x`.
        num_variables: The number of all variables.
    """
    flags = tf.constant([*(1 + place for place in places), 1 + num_variables])
    return tf.where(is_finite, 0, tf.gather(flags, ops.first_nonfinite(x, is_finite)))


def first_of(flags: list[tf.Tensor]) -> tf.Tensor:
    """Returns each worker's flag of the first variable, of flags of several buckets."""
    if not flags:
        return tf.zeros([0], tf.int32)
    if len(flags) == 1:
        return flags[0]
    table = tf.stack(flags)
    places = table % _NOTICE
    first = tf.reduce_min(tf.where(places > 0, places, table.dtype.max), axis=0)
    first = tf.where(tf.reduce_any(places > 0, axis=0), first, 0)
    return first + tf.reduce_max(table - places, axis=0)


def assertion(flags: tf.Tensor, paths: list[str]) -> tf.Operation | None:
    """Returns an operation that fails, with the path of the variable and the worker.

    Args:
        flags: All workers' flags, not all 0.
        paths: Paths of the variables.
    """
    # A gradient comes before a payload: a scale that workers share spreads a NaN.
    seen = tf.where(flags > 0, flags, flags.dtype.max)
    rank = tf.argmin(seen, output_type=tf.int32)
    places = [*(f"the gradient of {path}" for path in paths), "the compressed gradient"]
    message = tf.strings.join(
        [
            "NaN or Inf in ",
            tf.constant(places)[flags[rank] - 1],
            " on worker ",
            tf.strings.as_string(rank),
            "; the step was skipped on all workers and changed nothing. Lower the "
            "learning rate, clip (clipnorm=...), or go on with nonfinite='skip'",
        ]
    )
    return tf.debugging.Assert(tf.reduce_all(tf.equal(flags, 0)), [message])


def are_finite(gradients: list, collectives: Collectives) -> tf.Tensor:
    """Returns whether the gradients of this process, times N, are finite, a bool."""
    values = [getattr(gradient, "values", gradient) for gradient in gradients]
    floats = [value for value in values if value.dtype == tf.float32]
    # Products overflow in the type of the gradient, which float32 may not.
    others = [value for value in values if value.dtype != tf.float32]
    is_finite = tf.constant(True)
    if floats:
        vector = SplitVector(floats, collectives.num_workers)
        part = ops.first_nonfinite(vector, tf.constant(False))
        is_finite = tf.equal(part, len(floats))
    if others:
        is_finite &= all_finite(multiplied(others, collectives.num_workers))
    if collectives.num_workers == collectives.num_processes:
        return is_finite
    # Replicas of one process enter a conditional together.
    flag = tf.cast(tf.logical_not(is_finite), tf.float32)[tf.newaxis]
    return collectives.max(flag, "local_steps")[0] < 1


def check_none_left_out(count: int, hosts: Collectives | None) -> None:
    """Compares how many local steps the workers have left out; all must call it.

    Args:
        count: The number on this worker.
        hosts: The collectives between the workers' processes; None where there is one.

    Raises:
        FloatingPointError: On all workers, if any has left out a step.
    """
    counts = tf.constant([[count]])
    if hosts is not None:
        counts = hosts.gather(counts[0], "local_steps")
    by_worker = dict(enumerate(counts[:, 0].numpy().tolist()))
    if any(by_worker.values()):
        raise FloatingPointError(
            "Local steps were left out because a gradient was NaN or Inf. Lower the "
            "learning rate, clip (clipnorm=...), or go on with outer.nonfinite='skip'. "
            f"Received: steps left out by worker={by_worker}"
        )
