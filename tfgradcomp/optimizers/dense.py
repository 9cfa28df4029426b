"""Gradients as the dense tensors that are compressed."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfgradcomp.optimizers.agreement import path_of


def dense(
    gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable | tf.Variable
) -> tf.Tensor:
    """Returns the dense tensor that a gradient stands for, `IndexedSlices` included.

    Its static shape is the variable's, also where the graph does not know it: in that
    of an embedding of sequences whose length varies, for example.

    Raises:
        TypeError: If it is not of a float type.
    """
    gradient = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
    if not gradient.dtype.is_floating:
        raise TypeError(
            "Gradients must be of a float type to be compressed. Received: "
            f"dtype={gradient.dtype.name} for variable {path_of(variable)}; train it "
            "with an optimizer of its own, or split it into real parts."
        )
    return gradient
