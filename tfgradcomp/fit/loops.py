"""Loops of `fit`, `evaluate` and `predict` that begin and end together on all workers.

Each worker runs Keras' loops by itself, and a worker that leaves a loop alone makes the
others wait in a collective for ever. Three events end a loop:

- A callback sets `stop_training`, `stop_evaluating` or `stop_predicting`, perhaps on
  one worker only. The flag travels with the logs of the next step, or at the end of an
  epoch, and the loops read the flags of all workers (`stop_flag.py`).
- The number of batches that Keras knows is reached. The workers compare it before each
  pass (`pass_length.py`).
- The data end. In training the epoch ends where any replica lacks a row
  (`end_of_data.py`).
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.compat.epoch_iterator import (
    replace_begin_of_pass,
    replace_warning_of_early_end,
    strategy_of,
)
from tfgradcomp.compat.replace import replace
from tfgradcomp.compat.strategy import replace_reduction
from tfgradcomp.compat.trainer import is_in_loop, replace_loop
from tfgradcomp.fit.end_of_data import begin_counting, check_steps, end_epochs_together
from tfgradcomp.fit.loop_sync import (
    STOP_FLAGS,
    LoopSync,
    entered,
    innermost_loop,
    is_training,
    running_loop,
)
from tfgradcomp.fit.pass_length import agree_on_length
from tfgradcomp.fit.past_iterators import keep_iterators, remove_past_iterators
from tfgradcomp.fit.stop_flag import share_stop_flags


def synchronize_loops() -> None:
    """Makes Keras' loops begin and end together on all workers."""
    share_stop_flags()
    for kind in STOP_FLAGS:
        replace_loop(kind, functools.partial(_run_loop, kind))
    callbacks = keras.callbacks.CallbackList
    replace(callbacks, "on_epoch_end", _end_epoch)
    replace(callbacks, "on_train_batch_end", _end_batch)
    replace(callbacks, "on_train_end", _end_training)
    replace_begin_of_pass(_begin_pass)
    replace_warning_of_early_end(_warn_of_early_end)
    end_epochs_together()
    keep_iterators()
    replace_reduction(_reduce)


def _run_loop(kind, original, model, *args, **kwargs):
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return original(model, *args, **kwargs)
    loop = LoopSync(model, kind)
    if kind == "fit":
        begin_counting(strategy)
    with entered(loop):
        if kind == "fit":
            loop.check_same_start()
        else:
            loop.synchronize_weights()
            loop.average_statistics()
        try:
            return original(model, *args, **kwargs)
        finally:
            remove_past_iterators()


def _end_epoch(original, callbacks, epoch, logs=None):
    """Replaces `CallbackList.on_epoch_end`: no worker may begin another epoch alone."""
    loop = running_loop(callbacks.model, "fit")
    if loop:
        # Callbacks may save the model.
        loop.synchronize_weights()
        loop.verify()
        loop.average_statistics()
    result = original(callbacks, epoch, logs)
    if loop and loop.signals:
        loop.copy_first_worker()
        loop.signals.send_flags("fit/end of epoch")
        loop.warn_of_early_end()
    return result


def _end_batch(original, callbacks, batch, logs=None):
    """Replaces `CallbackList.on_train_batch_end`: compares workers now and then."""
    result = original(callbacks, batch, logs)
    loop = running_loop(callbacks.model, "fit")
    if loop:
        loop.verify_after(batch + 1)
        loop.decide()
    return result


def _end_training(original, callbacks, logs=None):
    """Replaces `CallbackList.on_train_end`, where callbacks may restore weights."""
    result = original(callbacks, logs)
    loop = running_loop(callbacks.model, "fit")
    if loop:
        loop.copy_first_worker()
    return result


def _begin_pass(original, epoch_iterator):
    """Begins a pass over the data with the same number of batches on all workers.

    Raises:
        RuntimeError: If the loop is Keras' own, without `_run_loop` around it.
    """
    loop = innermost_loop()
    if loop:
        loop.batches = 0
        if is_training():
            # A file that a callback has loaded may have changed the method.
            loop.decide()
        if loop.signals:
            agree_on_length(loop, loop.signals, epoch_iterator)
    elif _is_several(epoch_iterator) and is_in_loop():
        raise RuntimeError(
            "This loop of Keras does not keep step with the other workers, because "
            "`fit`, `evaluate` or `predict` was looked up before tfgradcomp replaced "
            "it. Call `tfgradcomp.enable_multi_worker_fit()` at the program's start, "
            "before any code keeps or patches these methods of `keras.Model`. "
            f"Received: strategy={type(strategy_of(epoch_iterator)).__name__}"
        )
    return original(epoch_iterator)


def _is_several(epoch_iterator):
    return strategy_of(epoch_iterator).num_replicas_in_sync > 1


def _warn_of_early_end(original, epoch_iterator):
    """Replaces Keras' warning, which advises to repeat the data, where it is wrong."""
    loop = innermost_loop()
    if loop and is_training():
        check_steps(loop.model.distribute_strategy)
        if loop.signals and loop.signals.workers_without_rows():
            return
    original(epoch_iterator)


def _reduce(original, *args, **kwargs):
    """Counts an eager reduction, by which Keras reads metrics of all workers."""
    if not tf.executing_eagerly():
        return original(*args, **kwargs)
    with SITES.within("reduction of a metric"):
        return original(*args, **kwargs)
