"""Attaching observers to the optimizer of a model that is in `fit`."""

from __future__ import annotations

import keras

from tfgradcomp.engine.probe import Observer, Probe
from tfgradcomp.engine.step import Stepper
from tfgradcomp.fit.wrappers import wrappers_of
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.local_steps import LocalSteps
from tfgradcomp.optimizers.wrapper import OptimizerWrapper


def wrapper_of(
    model: keras.Model, callback: str
) -> tuple[OptimizerWrapper, CompressedOptimizer]:
    """Returns the wrapper that trains a model, built, and the one that exchanges.

    The two differ for `LocalSteps` alone, whose `outer` wrapper exchanges.

    Args:
        model: The model, compiled.
        callback: Name of the calling callback, for errors.

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


def attach(
    model: keras.Model, wrapper: CompressedOptimizer, name: str, observer: Observer
) -> None:
    """Starts observing the steps of `fit`, which are traced again.

    Args:
        model: The model.
        wrapper: Its optimizer.
        name: Name of the observer; an observer of the same name is replaced.
        observer: The observer.
    """
    stepper = wrapper.stepper
    if stepper.probe is None:
        stepper.probe = Probe()
    stepper.probe.observers[name] = observer
    model.make_train_function(force=True)


def detach(
    model: keras.Model, wrapper: CompressedOptimizer, name: str, observer: Observer
) -> None:
    """Stops observing, so that the next `fit` traces steps without the observer."""
    probe = wrapper.stepper.probe
    if probe is None or probe.observers.get(name) is not observer:
        return
    del probe.observers[name]
    if not probe.observers:
        wrapper.stepper.probe = None
    model.make_train_function(force=True)
