"""The models of the chief and of each worker in a training on parameter servers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.parameter_server.remote_worker import RemoteWorker
from tfgradcomp.parameter_server.transport import ParameterServer


class ModelFactory:
    """Makes compiled models, each with a copy of the optimizer and of the metrics.

    `make_model` must return a new Keras model, not compiled, at each call.
    """

    def __init__(
        self,
        make_model: Callable[[], keras.Model],
        optimizer: CompressedOptimizer,
        loss,
        metrics: Sequence,
    ):
        self._make_model = make_model
        # Keeps no variables: they lose their values when the process connects.
        self._optimizer_class = type(optimizer)
        self._optimizer_config = optimizer.get_config()
        self._loss, self._metrics = loss, list(metrics)
        self._made: weakref.WeakSet = weakref.WeakSet()

    def make_chief(self) -> keras.Model:
        """Returns the chief's model; raises the errors of `make_worker`."""
        return self._compiled(self._new_optimizer())

    def make_worker(
        self, kind: type[RemoteWorker], device: str, transport: ParameterServer
    ) -> RemoteWorker:
        """Returns a new worker of a class, with its model on its device.

        Raises a ValueError if `make_model` returns the same model again, or if Keras
        would scale losses.
        """
        with tf.device(device):
            optimizer = self._new_optimizer(transport=transport)
            optimizer.stepper_class = transport.stepper_class
            return kind(device, self._compiled(optimizer))

    def _new_optimizer(self, **arguments):
        kind = self._optimizer_class
        # A configuration holds no transport.
        return kind(**kind.arguments_from(self._optimizer_config) | arguments)

    def _compiled(self, optimizer):
        model = self._make_model()
        if model in self._made:
            raise ValueError(
                "make_model must return a new model at each call, for the chief and "
                f"each worker. Received: the model {model.name!r} again"
            )
        self._made.add(model)
        metrics = keras.tree.map_structure(_copy, self._metrics)
        model.compile(optimizer, self._loss, metrics=metrics)
        if model.optimizer is not optimizer:
            raise ValueError(
                "Parameter servers do not support loss scaling. Use the dtype policy "
                "'mixed_bfloat16' or 'float32'. Received: "
                f"dtype_policy={keras.mixed_precision.dtype_policy().name!r}"
            )
        return model


def _copy(metric):
    if not isinstance(metric, keras.metrics.Metric):
        return metric
    config = keras.saving.serialize_keras_object(metric)
    return keras.saving.deserialize_keras_object(config)
