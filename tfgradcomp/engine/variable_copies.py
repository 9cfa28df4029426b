"""Copies of a model's variables that an optimizer trains in their place."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras.optimizers import Optimizer


def copy_of(
    optimizer: Optimizer, variable: keras.Variable, name: str
) -> keras.Variable:
    """Returns a variable of the optimizer that starts with a model variable's value."""
    copy = optimizer.add_variable_from_reference(
        variable,
        name=name,
        initializer=lambda shape, dtype: tf.convert_to_tensor(variable.value),
    )
    copy.reference = variable
    return copy


def originals_of(variables: list) -> list:
    """Returns the model's variable for each copy, and any other variable as it is."""
    return [getattr(variable, "reference", variable) for variable in variables]
