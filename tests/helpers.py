"""What several tests need of the package: a context, N workers, their variables."""

import re

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compressors import Compressed, Compressor
from tfgradcomp.core import Context, Layout, State

# What tests compare with follows Keras, which has changed: (3, 15) for "3.15.1".
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])


def make_context(
    step=0,
    seed=0,
    rank=0,
    num_workers=1,
    rate=0.1,
    previous_rate=0.0,
    moments=None,
):
    return Context(
        step=tf.cast(step, tf.int64),
        seed=tf.constant(seed, tf.int64),
        rank=rank,
        num_workers=num_workers,
        learning_rate=tf.cast(rate, tf.float32),
        previous_learning_rate=tf.cast(previous_rate, tf.float32),
        second_moments=moments,
    )


def compress_in_rounds(
    compressor: Compressor, x, state: State, layout: Layout, context: Context, reduce
) -> Compressed:
    """Compresses `x` after the first round, as a route does.

    Args:
        compressor: The compressor.
        x: The vector.
        state: The compressor's state.
        layout: The blocks.
        context: The step.
        reduce: Function from this worker's part of a declared field to the maximum
            over all workers.
    """
    prepared = compressor.prepare(x, state, layout, context)
    declared = compressor.max_reduced_fields(layout)
    reduced = {name: reduce(prepared[name]) for name in declared}
    context = context._replace(prepared={**prepared, **reduced})
    return compressor.compress(x, state, layout, context)


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
