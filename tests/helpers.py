"""What several tests need of the package: a context, N workers, their variables."""

import re

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.testing.inputs import make_context as make_context

# What tests compare with follows Keras, which has changed: (3, 15) for "3.15.1".
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])


@keras.saving.register_keras_serializable("tests")
class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate a step, the last one from then on."""

    def __init__(self, values):
        self.values = list(values)

    def __call__(self, step):
        index = tf.minimum(tf.cast(step, tf.int32), len(self.values) - 1)
        return tf.gather(tf.constant(self.values, tf.float32), index)

    def get_config(self):
        return {"values": self.values}


def make_variables(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        keras.Variable(rng.normal(size=shape).astype(np.float32), name=f"weight_{i}")
        for i, shape in enumerate(shapes)
    ]


def stable_id(value):
    """A parameter as the name of a test, the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def flat(arrays):
    return np.concatenate([np.reshape(np.asarray(a), [-1]) for a in arrays])


def split(vector, shapes):
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(vector, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def bits(array):
    """The very bits of an array, so that -0.0 and NaN compare as they are."""
    return np.asarray(array).tobytes()


def state_of(optimizer):
    """All variables of an optimizer by place and name, as bits."""
    return [(v.path, bits(v.numpy())) for v in optimizer.variables]


def named(optimizer, name):
    (variable,) = [v for v in optimizer.variables if v.name == name]
    return variable.numpy()
