"""Assertions that wait only for the tensors they check."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def checked(x: tf.Tensor, is_valid: tf.Tensor, message: Sequence) -> tf.Tensor:
    """Returns a tensor whose computation fails if it is not valid.

    TensorFlow puts all assertions of a graph into a sequence, without an option. If a
    process has several replicas in a graph, the next replica's assertion would wait
    for the collectives before this replica's, and these collectives for the next
    replica: for ever. A function of tensors is no part of the sequence.

    Args:
        x: The tensor to check.
        is_valid: Boolean scalar.
        message: Texts and tensors, the message of the error.

    Raises:
        tf.errors.InvalidArgumentError: If `is_valid` is False, when it is computed.
    """

    def identity(x, is_valid, *message):
        check = tf.debugging.Assert(is_valid, message, summarize=16)
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(x)

    arguments = [tf.convert_to_tensor(value) for value in (x, is_valid, *message)]
    if tf.executing_eagerly():
        return identity(*arguments)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    traced = tf.function(identity, autograph=False).get_concrete_function(*specs)
    call = tf.raw_ops.PartitionedCall
    (valid,) = call(args=arguments, Tout=[x.dtype], f=traced)
    return tf.ensure_shape(valid, x.shape)
