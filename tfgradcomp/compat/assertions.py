"""Assertions that wait for nothing but what they check."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def checked(x: tf.Tensor, is_valid: tf.Tensor, message: Sequence) -> tf.Tensor:
    """Returns a tensor, or an error that says why it is not valid.

    TensorFlow puts all assertions of a graph into one sequence. Where one process has
    several replicas, in one graph, the next replica's would wait for the collectives
    before this one, and these for the next replica: for ever. A function of tensors has
    no place in that sequence, whatever it asserts.

    Args:
        x: What is checked.
        is_valid: Boolean scalar.
        message: Texts and tensors, the message of the error.

    Raises:
        tf.errors.InvalidArgumentError: If it is not valid, when it is computed.
    """

    def identity(x, is_valid, *message):
        check = tf.debugging.Assert(is_valid, message, summarize=16)
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(x)

    arguments = [tf.convert_to_tensor(value) for value in (x, is_valid, *message)]
    if tf.executing_eagerly():
        return identity(*arguments)
    specs = [tf.TensorSpec(one.shape, one.dtype) for one in arguments]
    traced = tf.function(identity, autograph=False).get_concrete_function(*specs)
    call = tf.raw_ops.PartitionedCall
    (valid,) = call(args=arguments, Tout=[x.dtype], f=traced)
    return tf.ensure_shape(valid, x.shape)
