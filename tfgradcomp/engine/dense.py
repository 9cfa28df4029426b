"""Gradients in the forms that are compressed: dense tensors, or rows of a table."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfgradcomp.engine.consistency_check import path_of


def dense(
    gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable | tf.Variable
) -> tf.Tensor:
    """Returns the dense tensor of a gradient, with the static shape of its variable.

    The graph may not know that shape, for example if the length of sequences varies.

    Raises:
        TypeError: If the gradient is not of a float type.
    """
    gradient = tf.convert_to_tensor(gradient)
    if not gradient.shape == variable.shape:
        gradient = tf.ensure_shape(gradient, variable.shape)
    _check_type(gradient, variable)
    return gradient


def unique_rows(
    gradient: tf.IndexedSlices, variable: keras.Variable | tf.Variable
) -> tf.IndexedSlices:
    """Returns slices that have each row once, as the sum of its values.

    Raises:
        TypeError: If the gradient is not of a float type.
    """
    _check_type(gradient, variable)
    rows, places = tf.unique(tf.cast(gradient.indices, tf.int32))
    values = tf.reshape(gradient.values, [-1, *variable.shape[1:]])
    values = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, tf.constant([*variable.shape]))


def touched_rows(gradient: tf.Tensor) -> tf.IndexedSlices:
    """Returns the rows of a dense gradient that are not zero."""
    table = tf.reshape(gradient, [gradient.shape[0], -1])
    is_touched = tf.reduce_any(tf.not_equal(table, 0), 1)
    rows = tf.cast(tf.where(is_touched)[:, 0], tf.int32)
    values = tf.gather(gradient, rows)
    return tf.IndexedSlices(values, rows, tf.constant([*gradient.shape]))


def with_values(
    function: Callable[[list], list], gradients: list[tf.Tensor | tf.IndexedSlices]
) -> list:
    """Calls a function of a list of tensors on gradients, or on the values of slices.

    The function must map zeros to zeros, and the slices must have each row once.
    """
    values = [getattr(gradient, "values", gradient) for gradient in gradients]
    return [
        tf.IndexedSlices(new, gradient.indices, gradient.dense_shape)
        if isinstance(gradient, tf.IndexedSlices)
        else new
        for gradient, new in zip(gradients, function(values), strict=True)
    ]


def multiplied(
    gradients: list[tf.Tensor | tf.IndexedSlices], factor: float | int
) -> list:
    """Returns gradients times a factor."""
    return with_values(
        lambda values: [v * tf.cast(factor, v.dtype) for v in values], gradients
    )


def _check_type(gradient, variable):
    if not gradient.dtype.is_floating:
        raise TypeError(
            "Gradients must be of a float type to be compressed. Received: "
            f"dtype={gradient.dtype.name} for variable {path_of(variable)}; train it "
            "with an optimizer of its own, or split it into real parts."
        )
