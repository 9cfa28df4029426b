"""Test for the rows of a batch, of whatever parts it consists."""

from __future__ import annotations

import keras
import tensorflow as tf


def has_rows(optional: tf.experimental.Optional) -> tf.Tensor:
    """Returns 1 if an optional batch has rows, else 0."""

    def of_value():
        leaves = keras.tree.flatten(optional.get_value())
        rows = [_count_rows(leaf) for leaf in leaves if _is_batched(leaf)]
        return tf.cast(rows[0] > 0, tf.int64) if rows else tf.constant(1, tf.int64)

    return tf.cond(optional.has_value(), of_value, lambda: tf.constant(0, tf.int64))


def _is_batched(leaf):
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return tf.is_tensor(leaf) and leaf.shape.rank != 0


def _count_rows(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]
