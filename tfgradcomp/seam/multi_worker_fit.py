"""`model.fit` under MultiWorkerMirroredStrategy on Keras 3.

Three faults are mended, all in Keras' TensorFlow backend:

- the symbolic build before the first step averages a nest of per-replica values over
  the workers, which fails; the first local batch does as well;
- the logs of a step are reduced over an axis that scalars have not, by collectives
  that fail inside `steps_per_execution`; they are averaged as one vector instead;
- `LossScaleOptimizer` decides by each worker's own gradients whether to step, so that
  one overflow makes the others wait for ever; here the workers vote.

Under any other strategy, and without one, the original code runs.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgradcomp.transports import collectives


def enable_multi_worker_fit() -> None:
    """Makes Keras 3 train under `tf.distribute.MultiWorkerMirroredStrategy`.

    `fit`, `evaluate` and `predict` work, with `validation_data`,
    `steps_per_execution` and mixed precision. The optimizers of this package call
    it by themselves; call it for any other optimizer, before `fit`. Calling it again
    does nothing.

    Example:
        ```python
        tfgradcomp.enable_multi_worker_fit()
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y)
        ```
    """
    _replace(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build", _symbolic_build)
    _replace(keras_trainer, "reduce_per_replica", _reduce_per_replica)
    _replace(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)


def is_multi_worker(strategy) -> bool:
    """Whether the strategy spans several processes."""
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )


@functools.cache
def across_hosts(strategy) -> collectives.Hosts:
    """Returns the collectives between the processes of a multi-worker strategy."""
    return collectives.Hosts(collectives.place_of(strategy))


def _replace(owner, name, replacement):
    original = getattr(owner, name)
    if not hasattr(original, "_tfgradcomp_original"):
        function = functools.wraps(original)(functools.partial(replacement, original))

        @functools.wraps(original)
        def method(*args, **kwargs):
            return function(*args, **kwargs)

        method._tfgradcomp_original = original
        setattr(owner, name, method)


def _symbolic_build(original, trainer, iterator=None, data_batch=None):
    strategy = trainer.distribute_strategy
    if iterator is None or not is_multi_worker(strategy):
        return original(trainer, iterator=iterator, data_batch=data_batch)
    for _, _, batches in iterator:
        data_batch = keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], next(batches)
        )
        break
    return original(trainer, data_batch=data_batch)


def _reduce_per_replica(original, values, strategy, reduction):
    if reduction not in ("auto", "mean") or not is_multi_worker(strategy):
        return original(values, strategy, reduction)
    leaves = keras.tree.flatten(values)
    locals_ = [strategy.experimental_local_results(leaf) for leaf in leaves]
    means = [tf.reduce_mean(tf.cast(tf.stack(v), tf.float32), axis=0) for v in locals_]
    if not means:
        return values
    flat = tf.concat([tf.reshape(mean, [-1]) for mean in means], 0)
    hosts = across_hosts(strategy)
    flat = hosts.sum(flat, f"logs/{flat.shape[0]}") / hosts.num_workers
    parts = tf.split(flat, [mean.shape.num_elements() for mean in means])
    return keras.tree.pack_sequence_as(
        values,
        [tf.reshape(part, mean.shape) for part, mean in zip(parts, means, strict=True)],
    )


@functools.cache
def _votes(strategy):
    return collectives.for_strategy(strategy)


def _check_finite(original, optimizer, gradients):
    overflow = tf.logical_not(original(optimizer, gradients))
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        flag = tf.cast(overflow, tf.float32)[tf.newaxis]
        overflow = _votes(strategy).max(flag, "overflow")[0] > 0
    return tf.logical_not(overflow)
