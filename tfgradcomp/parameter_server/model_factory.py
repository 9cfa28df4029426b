"""The models of a training on parameter servers: the chief's and each worker's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.parameter_server.remote_worker import RemoteWorker
from tfgradcomp.parameter_server.transport import ParameterServer


class ModelFactory:
    """Makes compiled models, each with an optimizer of its own.

    Args:
        make_model: Function that returns a new Keras model, not compiled.
        optimizer: The optimizer to copy; it is not kept.
        loss: As in `keras.Model.compile`.
        metrics: As in `keras.Model.compile`.
    """

    def __init__(
        self,
        make_model: Callable[[], keras.Model],
        optimizer: CompressedOptimizer,
        loss,
        metrics: Sequence,
    ):
        self._make_model = make_model
        # Variables lose their values when the process connects to the cluster.
        self._optimizer_class = type(optimizer)
        self._optimizer_config = optimizer.get_config()
        self._loss, self._metrics = loss, list(metrics)
        self._made: weakref.WeakSet = weakref.WeakSet()

    def make_chief(self) -> keras.Model:
        """Returns the chief's model.

        Raises:
            ValueError: As `make_worker`.
        """
        return self._compiled(self._new_optimizer())

    def make_worker(
        self, kind: type[RemoteWorker], device: str, transport: ParameterServer
    ) -> RemoteWorker:
        """Returns a new worker.

        Args:
            kind: Its class.
            device: The worker's device.
            transport: The transport of its optimizer.

        Raises:
            ValueError: If `make_model` returns the same model again, or Keras wants
                to scale losses.
        """
        with tf.device(device):
            optimizer = self._new_optimizer(transport=transport)
            optimizer.stepper_class = transport.stepper_class
            return kind(device, self._compiled(optimizer))

    def _new_optimizer(self, **arguments):
        return self._optimizer_class.from_config(self._optimizer_config | arguments)

    def _compiled(self, optimizer):
        model = self._make_model()
        if model in self._made:
            raise ValueError(
                "make_model must return a new model whenever it is called: chief and "
                "workers have one each. Received: the same model again"
            )
        self._made.add(model)
        metrics = keras.tree.map_structure(_copy, self._metrics)
        model.compile(optimizer, self._loss, metrics=metrics)
        if model.optimizer is not optimizer:
            raise ValueError(
                "With parameter servers losses are not scaled. Use the policy "
                "'mixed_bfloat16' or 'float32' instead of "
                f"'{keras.mixed_precision.dtype_policy().name}'."
            )
        return model


def _copy(metric):
    if not isinstance(metric, keras.metrics.Metric):
        return metric
    config = keras.saving.serialize_keras_object(metric)
    return keras.saving.deserialize_keras_object(config)
