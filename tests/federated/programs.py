"""A model and data that the commands of the tests name."""

import keras
import numpy as np
import tensorflow as tf


def make_model():
    model = keras.Sequential(
        [
            keras.Input([8]),
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def dataset():
    rng = np.random.default_rng()
    x = rng.normal(size=[256, 8]).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(16)
