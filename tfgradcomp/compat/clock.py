"""A clock that a graph reads whenever its control inputs are there."""

from __future__ import annotations

import functools

import tensorflow as tf


@functools.cache
def _handle() -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        # Nothing ever reads or writes it.
        return tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[], shared_name="tfgradcomp_clock"
        )


@tf.function(input_signature=[tf.TensorSpec([], tf.resource)], autograph=False)
def _read_clock(handle):
    return tf.timestamp()


def read_clock() -> tf.Tensor:
    """Returns the time in float64 seconds since 1970.

    `tf.timestamp` is an operation with effects and no resource. Such are put into one
    sequence, the order of the program, so that each reading would wait for all before
    it. Here it stands in a function that takes a resource: readings of a resource have
    no order.
    """
    return _read_clock(_handle())
