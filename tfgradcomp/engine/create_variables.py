"""Creation of an optimizer's variables, wherever its first step is taken."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.inner_optimizer import strategy_of
from tfgradcomp.compat.strategy import runs_without_merge_call
from tfgradcomp.compat.variables import tensorflow_variable


def create_variables(optimizer: Optimizer, function: Callable, variables: list) -> None:
    """Calls a function that creates variables, once for all replicas and eagerly.

    A first step may be taken anywhere: within a `tf.function`, in a replica's context,
    under a conditional. There nothing can be measured or read, and each local replica
    would create variables of its own.

    Args:
        optimizer: A Keras optimizer, whose strategy is entered outside of any.
        function: Function of the model's variables that creates variables.
        variables: The model's variables.
    """

    def eagerly(_: tf.distribute.Strategy | None = None) -> None:
        with tf.init_scope(), tf.variable_creator_scope(_not_lifted):
            function(variables)

    if not tf.distribute.has_strategy():
        with strategy_of(optimizer).scope():
            if _have_values(variables):
                eagerly()
            else:
                # The variables get their values in this very graph.
                function(variables)
        return
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and not runs_without_merge_call():
        tf.distribute.get_replica_context().merge_call(eagerly)
    else:
        eagerly()


def _have_values(variables):
    """Returns whether all variables can be read now, outside of any graph."""
    with tf.init_scope():
        values = [tensorflow_variable(variable) for variable in variables]
        return tf.executing_eagerly() and all(
            value is not None and bool(value.is_initialized()) for value in values
        )


def _not_lifted(create, **arguments):
    """Creates a variable that the surrounding `tf.function` does not see.

    TensorFlow traces a function twice if it creates variables itself.
    """
    return create(**{**arguments, "experimental_enable_variable_lifting": False})
