"""Parts of Keras' train step that have no public name."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgradcomp.compat.replace import replace

replace_train_step = partial(replace, keras_trainer.TensorFlowTrainer, "train_step")
"""Makes models take steps by `function(original, model, data)`, which returns the logs.

Models that override `train_step` keep theirs. Keras has no way to change the step of
models that others have written.
"""

replace_finite_update = partial(
    replace, keras.optimizers.LossScaleOptimizer, "_stateful_handle_finite_grads"
)
"""Replaces the update by finite gradients, inside the conditional for overflows.

The function is called as `function(original, optimizer, gradients, variables)`. The
public `apply` is outside of that conditional.
"""


def build(model: keras.Model, data: Any) -> None:
    """Creates the variables of a compiled model that none of its steps has created.

    Without a strategy Keras leaves that to the first call in a step.
    """
    if not all(layer.built for layer in model._flatten_layers()):
        model._symbolic_build(data_batch=data)


def predict_in_training(model: keras.Model, x: Any) -> Any:
    """Calls a model as its train step does.

    Keras does not show whether `call` takes the argument `training`.
    """
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> tf.Tensor:
    """Returns the loss of a train step, divided by the number of replicas.

    The public `compute_loss` of a subclass may take no `training`.
    """
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
    )


def track_loss(model: keras.Model, loss: tf.Tensor, batch_size: tf.Tensor) -> None:
    """Adds the result of `compute_loss` to the mean in the logs, a private metric."""
    model._loss_tracker.update_state(
        keras_trainer.loss_module.unscale_loss_for_distribution(loss),
        sample_weight=batch_size,
    )
