"""Base of the callbacks that observe the steps of `fit` from within."""

from __future__ import annotations

import keras

from tfgradcomp.callbacks.workers import Workers
from tfgradcomp.engine.probe import Observer
from tfgradcomp.engine.step import Stepper
from tfgradcomp.fit.wrappers import wrappers_of
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.local_steps import LocalSteps
from tfgradcomp.optimizers.wrapper import OptimizerWrapper


class ObservingCallback(keras.callbacks.Callback):
    """Attaches an observer to the optimizer of the model while `fit` runs.

    Attributes:
        _wrapper: The wrapper that trains the model.
        _optimizer: The wrapper that exchanges: `outer` of `LocalSteps`, else the same.
        _workers: The workers of the training.
        _observer: The observer, once it is attached.
        _observed: The stepper that it is attached to; `Auto` changes its stepper.
    """

    _observer: Observer | None = None
    _observed: Stepper | None = None

    def on_train_begin(self, logs=None):
        """Finds the optimizer and the workers."""
        self._close()
        self._wrapper, self._optimizer = _wrappers_of(self.model, type(self).__name__)
        self._workers = Workers(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Starts observing, once all callbacks have restored their state."""
        if self._observed is not self._optimizer.stepper:
            self._detach()
            with self.model.distribute_strategy.scope():
                self._observer = self._make_observer()
            # Replaces an observer whose `fit` ended with an error.
            self._observed = self._optimizer.stepper
            self._observed.observers[type(self).__name__] = self._observer
            self.model.make_train_function(force=True)

    def _make_observer(self) -> Observer:
        raise NotImplementedError

    def _close(self) -> None:
        """Stops observing, so that the next `fit` traces steps without the observer."""
        self._detach()

    def _detach(self) -> None:
        """Takes the observer from the stepper that it is attached to."""
        observer, self._observer = self._observer, None
        observed, self._observed = self._observed, None
        if observer is None or observed is None:
            return
        name = type(self).__name__
        if observed.observers.get(name) is observer:
            del observed.observers[name]
            self.model.make_train_function(force=True)


def _wrappers_of(
    model: keras.Model, callback: str
) -> tuple[OptimizerWrapper, CompressedOptimizer]:
    """Returns the wrapper that trains a model, built, and the wrapper that exchanges.

    Raises:
        ValueError: If there is not exactly one wrapper, if it cannot be built yet, or
            if its steps cannot be observed.
    """
    found = wrappers_of(model)
    if len(found) != 1:
        names = [type(optimizer).__name__ for optimizer in found]
        raise ValueError(
            f"{callback} observes one optimizer of this package. Compile the model "
            "with one, such as TernGrad(SGD(0.1)). "
            f"Received: optimizers={names}"
        )
    (wrapper,) = found
    if not wrapper.built:
        if not model.built:
            raise ValueError(
                f"{callback} must know the model's variables when `fit` begins. Give "
                "the model an Input layer, or call it on a batch before `fit`. "
                f"Received: model={model.name}, not built"
            )
        with model.distribute_strategy.scope():
            wrapper.build(model.trainable_variables)
    exchanging = wrapper.outer if isinstance(wrapper, LocalSteps) else wrapper
    if type(exchanging.stepper).take is not Stepper.take:
        raise ValueError(
            f"{callback} cannot observe steps with parameter servers. Use `fit` with "
            "MultiWorkerMirroredStrategy, MirroredStrategy or no strategy. "
            f"Received: stepper={type(exchanging.stepper).__name__}"
        )
    return wrapper, exchanging
