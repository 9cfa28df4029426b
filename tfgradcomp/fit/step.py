"""The functions that Keras compiles for a step, and their logs, on several workers."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfgradcomp.collectives.replicas import for_strategy
from tfgradcomp.compat.distributed_dataset import specs_of_replica
from tfgradcomp.compat.epoch_iterator import distributed_dataset
from tfgradcomp.compat.replace import replace
from tfgradcomp.compat.trainer import (
    replace_reduction_of_logs,
    replace_step_compilation,
    replace_symbolic_build,
    strategy_at_creation,
)
from tfgradcomp.fit.end_of_data import count_rows
from tfgradcomp.fit.signals import signals_of

_collectives_of = functools.cache(for_strategy)


def adapt_steps() -> None:
    """Makes the steps of Keras' trainer work on several workers."""
    replace_symbolic_build(_build)
    replace_step_compilation(_compile_step)
    replace_reduction_of_logs(_reduce_logs)
    replace(keras.Model, "predict_step", _predict_step)
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)


def _build(original, model, iterator=None, data_batch=None):
    """Builds a model from the dataset's specification, without reading a batch.

    Keras averages a batch over the workers, which fails; shapes and types are enough.
    An iterator opened for one batch would go on filling a `Dataset.cache()` in the
    background, race with the next iterator, and make it end early.
    """
    strategy = strategy_at_creation(model)
    if iterator is None or strategy is None:
        return original(model, iterator=iterator, data_batch=data_batch)
    if type(model).call is keras.Model.call:
        # A model without `call` is built by its first step, as without a strategy.
        return None
    data = distributed_dataset(iterator)
    specs = specs_of_replica(data)
    if any(spec.shape.rank is None for spec in specs):
        for *_, batches in iterator:  # Before Keras 3.11 there are pairs.
            batch = next(batches)
            specs = [
                strategy.experimental_local_results(v)[0]
                for v in tf.nest.flatten(batch)
            ]
            break
    batch = tf.nest.pack_sequence_as(data.element_spec, specs)
    return original(model, data_batch=batch)


def _compile_step(original, model, step_function):
    """Compiles a step whose replicas wait for each other only where all take part."""
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1 and model.jit_compile:
        raise ValueError(
            "jit_compile=True does not work with several replicas: XLA cannot compile "
            "the exchange between them. Compile the model with jit_compile=False, or "
            'leave the argument out: "auto" is False there. '
            f"Received: jit_compile=True, strategy={type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas"
        )
    if strategy.num_replicas_in_sync == 1:
        return original(model, step_function)
    is_stock_test = getattr(step_function, "__func__", None) is keras.Model.test_step

    def step(data):
        if is_stock_test:
            # A replica's share of the last batches may be empty, and LSTMs and
            # oneDNN's convolutions fail on empty tensors.
            return tf.cond(
                count_rows(data) > 0,
                lambda: step_function(data),
                model.get_metrics_result,
            )
        leaves = tf.nest.flatten(data, expand_composites=True)
        batch = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        # Where the data end instead of a batch, no worker may begin an exchange that
        # needs no batch (noise, positions): half of a collective would be left behind
        # for the next one of its name.
        with tf.control_dependencies(batch), tf.variable_creator_scope(_create):
            logs = step_function(data)
        if model.optimizer is None:
            return logs
        # The same holds for the reduction of logs where a step ends in an error.
        with tf.control_dependencies([tf.identity(model.optimizer.iterations)]):
            return tf.nest.map_structure(tf.identity, logs)

    return original(model, step)


def _create(next_creator, **arguments):
    """Creates a variable of a step whose initial value waits for nothing.

    TensorFlow computes initial values before the step, which it cannot do if they
    depend on the batch.
    """
    with tf.control_dependencies(None):
        return next_creator(**arguments)


def _predict_step(original, model, data):
    """Predicts a row of zeros where a replica's share is empty, and drops it again."""
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return original(model, data)
    rows = count_rows(data)

    def add_row_if_empty(leaf):
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
            return leaf
        shape = tf.concat([[1], tf.shape(leaf)[1:]], 0)
        row = functools.partial(tf.zeros, shape, leaf.dtype)
        return tf.cond(rows > 0, lambda: leaf, row)

    outputs = original(model, keras.tree.map_structure(add_row_if_empty, data))
    factor = tf.minimum(rows, 1)
    return keras.tree.map_structure(
        lambda leaf: leaf[: tf.shape(leaf, tf.int64)[0] * factor], outputs
    )


def _reduce_logs(original, values, strategy, reduction):
    """Averages the logs of a step over the workers, as one vector behind the flags.

    Keras reduces them over an axis that scalars lack, by collectives that fail inside
    of `steps_per_execution`.
    """
    signals = signals_of(strategy)
    if signals is None:
        return original(values, strategy, reduction)
    if reduction not in ("auto", "mean"):
        signals.send_flags("fit/outputs")
        return original(values, strategy, reduction)
    leaves = keras.tree.flatten(values)
    locals_ = [strategy.experimental_local_results(leaf) for leaf in leaves]
    means = [tf.reduce_mean(tf.cast(tf.stack(v), tf.float32), axis=0) for v in locals_]
    flat = tf.concat([tf.zeros([0]), *[tf.reshape(mean, [-1]) for mean in means]], 0)
    flat = signals.sum_with_flags(flat, "fit/logs") / signals.num_workers
    parts = tf.split(flat, [mean.shape.num_elements() for mean in means])
    shaped = [tf.reshape(p, m.shape) for p, m in zip(parts, means, strict=True)]
    return keras.tree.pack_sequence_as(values, shaped)


def _check_finite(original, optimizer, gradients):
    """Makes a `LossScaleOptimizer` skip a step on all replicas, or on none.

    Keras decides by each worker's own gradients, so that one overflow makes the other
    workers wait for ever.
    """
    overflow = tf.logical_not(original(optimizer, gradients))
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        flag = tf.cast(overflow, tf.float32)[tf.newaxis]
        overflow = _collectives_of(strategy).max(flag, "overflow")[0] > 0
    return tf.logical_not(overflow)
