"""Parts of Keras' train step that have no public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgradcomp.compat.replace import replace


def replace_train_step(function: Callable) -> None:
    """Makes `model.fit` take its steps by a function, unless a model overrides them.

    Keras has no way to change the step of models that others have written.

    Args:
        function: Called as `function(original, model, data)`; returns the logs.
    """
    replace(keras_trainer.TensorFlowTrainer, "train_step", function)


def replace_finite_update(function: Callable) -> None:
    """Makes `LossScaleOptimizer` apply finite gradients by a function.

    The public `apply` is outside of the conditional that skips an overflow.

    Args:
        function: Called as `function(original, optimizer, gradients, variables)` inside
            that conditional.
    """
    replace(
        keras.optimizers.LossScaleOptimizer, "_stateful_handle_finite_grads", function
    )


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
    """Adds the loss of a train step to the mean in the logs.

    Keras has no public name for this metric.

    Args:
        model: The model.
        loss: The loss that `compute_loss` returned.
        batch_size: Number of examples, the weight of this loss in the mean.
    """
    model._loss_tracker.update_state(
        keras_trainer.loss_module.unscale_loss_for_distribution(loss),
        sample_weight=batch_size,
    )
