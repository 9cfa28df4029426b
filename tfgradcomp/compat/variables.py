"""TensorFlow variables behind the variables of Keras."""

from __future__ import annotations

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable


def tensorflow_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns the TensorFlow variable of a Keras variable; any other as it is.

    The public `value` may be a tensor of another type under autocast.
    """
    return getattr(variable, "_value", variable)


def tensorflow_variables(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the TensorFlow variable, then its components on local replicas."""
    strategy = tf.distribute.get_strategy()
    value = tensorflow_variable(variable)
    return [value, *strategy.experimental_local_results(value)]


def add_number_conversions() -> None:
    """Makes `float` and `int` of a strategy's variables work.

    TensorFlow's other variables have these conversions; `DistributedVariable` has not.
    """
    for kind in (float, int):
        name = f"__{kind.__name__}__"
        setattr(DistributedVariable, name, lambda self, kind=kind: kind(self.numpy()))
