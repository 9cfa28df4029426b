"""A clock that a graph reads as soon as its control inputs are ready."""

from __future__ import annotations

import functools

import tensorflow as tf


@functools.cache
def _handle() -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        # The variable is never read or written.
        return tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[], shared_name="tfgradcomp_clock"
        )


@tf.function(input_signature=[tf.TensorSpec([], tf.resource)], autograph=False)
def _read_clock(handle):
    return tf.timestamp()


def read_clock() -> tf.Tensor:
    """Returns the time in float64 seconds since 1970.

    `tf.timestamp` is an operation with effects and no resource. TensorFlow runs such
    operations in the order of the program, so that each reading would wait for all
    operations before it, and has no option against it. Here the operation is inside a
    function that takes a resource: readings of a resource have no order.
    """
    return _read_clock(_handle())
