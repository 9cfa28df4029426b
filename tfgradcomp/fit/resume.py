"""Resuming `fit` where an earlier run has ended."""

from __future__ import annotations

import inspect

import keras

from tfgradcomp.compat.epoch_iterator import epoch_iterator_of, skip_batches
from tfgradcomp.compat.trainer import frame_of_fit, set_first_epoch
from tfgradcomp.fit.wrappers import optimizers_of


def prepare_to_resume(model: keras.Model, epoch: int, batch: int = 0) -> None:
    """Creates the optimizer's variables and makes `fit` continue at a batch.

    Args:
        model: The model.
        epoch: The epoch to begin with.
        batch: Number of its batches to skip.

    Raises:
        ValueError: If the model has no weights yet, or an optimizer no variables.
        RuntimeError: If batches are to be skipped, but the model is not in `fit`.
    """
    if not model.built:
        raise ValueError(
            "A model must be built before its weights can be restored. Give it an "
            "Input layer, or call it on a batch before `fit`. "
            f"Received: model={model.name}, not built"
        )
    if not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    unbuilt = [one.name for one in optimizers_of(model) if not one.built]
    if unbuilt:
        raise ValueError(
            "The state of an optimizer is restored into its variables. Expected: "
            "`optimizer.build(variables)` before `fit`, for each optimizer of a model "
            f"with several. Received: model={model.name}, not built: {unbuilt}"
        )
    frame = frame_of_fit(model, inspect.currentframe())
    if frame is not None:
        # Also withdraws the request of an attempt with another backup.
        skip_batches(epoch_iterator_of(frame), batch)
    elif batch:
        raise RuntimeError(
            "Only Keras' own `fit` can skip batches. Expected: a backup of the end of "
            f"an epoch. Received: batch={batch} of epoch={epoch}"
        )
    set_first_epoch(model, epoch)
