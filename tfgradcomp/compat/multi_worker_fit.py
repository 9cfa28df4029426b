"""`model.fit` under MultiWorkerMirroredStrategy on Keras 3.

These faults are mended in Keras:

- the symbolic build before the first step averages a batch over the workers, which
  fails; shapes and types are enough. They are read off the dataset's specification:
  an iterator opened for one batch goes on filling a `Dataset.cache()` in the
  background, and races with the next one, which then ends early;
- the logs of a step are reduced over an axis that scalars have not, by collectives
  that fail inside `steps_per_execution`; they are averaged as one vector instead;
- `LossScaleOptimizer` decides by each worker's own gradients whether to step, so that
  one overflow makes the others wait for ever; here the workers vote;
- a model without `call` cannot be built so; its first step builds it;
- a worker whose share of the last batches is empty evaluates nothing, and oneDNN's
  convolutions fail on nothing; here such a worker sits out;
- a worker that leaves a loop alone makes the others wait for ever (`lockstep.py`);
- statistics of normalization differ between workers (`statistics.py`);
- workers that save to one path spoil each other's file (`shared_paths.py`);
- `float(optimizer.learning_rate)` and the like fail under a strategy, and so do random
  numbers without a seed (`replica_threads.py`).

Under any other strategy the symbolic build reads no data either, and several devices
vote on an overflow, average their statistics and take a step only if each has a row.
For the rest, and without a strategy, the original code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.distribute.values import DistributedVariable

from tfgradcomp.compat import shared_paths
from tfgradcomp.compat.lockstep import Lockstep
from tfgradcomp.compat.replace import replace
from tfgradcomp.compat.replica_threads import share_global_seeds
from tfgradcomp.compat.strategy import is_multi_worker, reads_as_processes


def mend_keras(hosts_of: Callable, replicas_of: Callable) -> None:
    """Replaces what is at fault in Keras, once, however often it is called.

    Args:
        hosts_of: Function of a strategy that returns the collectives between its
            processes, with `sum(vector, call_site)` and `num_workers`.
        replicas_of: Function of a strategy that returns the collectives between its
            replicas, with `max(vector, call_site)`.
    """
    lockstep = Lockstep(hosts_of)
    lockstep.install()
    share_global_seeds()
    replace(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build", _symbolic_build)
    replace(keras_trainer.TensorFlowTrainer, "_make_function", _make_function)
    replace(keras_trainer, "reduce_per_replica", _mean_of_logs(lockstep.signals_of))
    replace(keras.Model, "save", shared_paths.save)
    replace(keras.Model, "save_weights", shared_paths.save)
    replace(keras.callbacks.ModelCheckpoint, "_save_model", shared_paths.checkpoint)
    replace(
        keras.callbacks.BackupAndRestore, "on_train_begin", shared_paths.begin_backup
    )
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _vote_of(replicas_of))
    for kind in (float, int):
        # As other variables of TensorFlow have them.
        name = f"__{kind.__name__}__"
        setattr(DistributedVariable, name, _conversion_to(kind))


def _conversion_to(kind):
    return lambda variable: kind(variable.numpy())


def _symbolic_build(original, trainer, iterator=None, data_batch=None):
    strategy = trainer._distribute_strategy
    if iterator is None or strategy is None:
        return original(trainer, iterator=iterator, data_batch=data_batch)
    if type(trainer).call is keras.Model.call:
        # There is nothing to call: as without a strategy, the first step builds.
        return None
    specs = [
        spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
        for spec in tf.nest.flatten(iterator._distributed_dataset.element_spec)
    ]
    if any(spec.shape.rank is None for spec in specs):
        for *_, batches in iterator:  # Before Keras 3.11 there are pairs.
            batch = next(batches)
            specs = [
                strategy.experimental_local_results(v)[0]
                for v in tf.nest.flatten(batch)
            ]
            break
    structure = iterator._distributed_dataset.element_spec
    return original(trainer, data_batch=tf.nest.pack_sequence_as(structure, specs))


def _make_function(original, trainer, step_function):
    is_stock_test = (
        getattr(step_function, "__func__", None)
        is keras_trainer.TensorFlowTrainer.test_step
    )
    strategy = trainer.distribute_strategy
    if strategy.num_replicas_in_sync > 1 and trainer.jit_compile:
        raise ValueError(
            "jit_compile=True does not work with several replicas: XLA cannot compile "
            "what they exchange. Compile the model with jit_compile=False, or leave "
            'the argument out: "auto" is False there. '
            f"Received: jit_compile=True, strategy={type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas"
        )
    is_one_of_several = is_multi_worker(strategy)
    sits_out = is_stock_test and (is_one_of_several or reads_as_processes(strategy))
    if not (is_one_of_several or sits_out):
        return original(trainer, step_function)

    def test_step_unless_empty(data):
        rows = tf.shape(tf.nest.flatten(data)[0])[0]
        return tf.cond(
            rows > 0, lambda: step_function(data), trainer.get_metrics_result
        )

    def step_then_logs(data):
        logs = step_function(data)
        if trainer.optimizer is None:
            return logs
        # Where a step ends in an error, no worker may begin to reduce its logs: half of
        # a collective would be left behind for the next one of its name.
        with tf.control_dependencies([tf.identity(trainer.optimizer.iterations)]):
            return tf.nest.map_structure(tf.identity, logs)

    return original(trainer, test_step_unless_empty if sits_out else step_then_logs)


def _mean_of_logs(signals_of):
    def reduce_per_replica(original, values, strategy, reduction):
        if not is_multi_worker(strategy):
            return original(values, strategy, reduction)
        signals = signals_of(strategy)
        if reduction not in ("auto", "mean"):
            signals.travel_with(tf.zeros([0]), "lockstep/outputs")
            return original(values, strategy, reduction)
        leaves = keras.tree.flatten(values)
        locals_ = [strategy.experimental_local_results(leaf) for leaf in leaves]
        means = [
            tf.reduce_mean(tf.cast(tf.stack(v), tf.float32), axis=0) for v in locals_
        ]
        flat = tf.concat(
            [tf.zeros([0]), *[tf.reshape(mean, [-1]) for mean in means]], 0
        )
        flat = signals.travel_with(flat, "logs") / signals.num_workers
        parts = tf.split(flat, [mean.shape.num_elements() for mean in means])
        shaped = [tf.reshape(p, m.shape) for p, m in zip(parts, means, strict=True)]
        return keras.tree.pack_sequence_as(values, shaped)

    return reduce_per_replica


def _vote_of(replicas_of):
    votes = functools.cache(replicas_of)

    def check_finite(original, optimizer, gradients):
        overflow = tf.logical_not(original(optimizer, gradients))
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1:
            flag = tf.cast(overflow, tf.float32)[tf.newaxis]
            overflow = votes(strategy).max(flag, "overflow")[0] > 0
        return tf.logical_not(overflow)

    return check_finite
