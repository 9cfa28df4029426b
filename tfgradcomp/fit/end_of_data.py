"""The end of the data: in training a step is taken only if every replica has a row.

TensorFlow continues until all workers have reached the end of their data, and hands out
empty batches meanwhile. Evaluation and prediction need that to show every row. In
training, empty batches spoil the statistics of batch normalization and the votes of
signs, and convolutions on a CPU fail.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.compat.distributed_dataset import (
    has_optional_batches,
    raise_end_of_data,
    replace_count_of_replicas_with_data,
    replace_next_batch,
)
from tfgradcomp.compat.local_variable import local_zeros
from tfgradcomp.compat.strategy import is_multi_worker
from tfgradcomp.fit.loop_sync import innermost_loop, is_training


def end_epochs_together() -> None:
    """Makes an epoch of training end for all replicas if one of them has no row."""
    replace_next_batch(_next_batch)
    replace_count_of_replicas_with_data(_replicas_with_rows)


def begin_counting(strategy: tf.distribute.Strategy) -> None:
    """Begins to count the steps of a call of `fit`."""
    _progress_of(strategy).assign([0, 0])


def check_steps(strategy: tf.distribute.Strategy) -> None:
    """Checks, when `fit` has ended, that it could take a step.

    Raises:
        ValueError: If the first batch had rows for some replicas only.
    """
    steps, replicas = _progress_of(strategy).numpy()
    if replicas and not steps:
        total = strategy.num_replicas_in_sync
        raise ValueError(
            "`fit` can take no step: each replica needs a row of the first batch. "
            "Expected: a global batch of at least as many rows as there are "
            "replicas, which `batch_size` counts together, and data for each "
            f"worker. Received: rows for {replicas} of {total} replicas"
        ) from None


@functools.cache
def _progress_of(strategy):
    """Returns the steps of the last `fit`, and the replicas with rows in its batch."""
    return local_zeros([2], tf.int64)


def _next_batch(original, iterator, name=None):
    """Raises `OutOfRangeError` for all replicas if one of them has no row."""
    if not (is_training() and has_optional_batches(iterator)):
        return original(iterator, name)
    batch = iterator.get_next_as_optional()
    checked = tf.cond(
        batch.has_value(), lambda: tf.constant(0, tf.int64), raise_end_of_data
    )
    with tf.control_dependencies([checked]):
        return batch.get_value()


def _replicas_with_rows(original, strategy, input_workers, optionals):
    """Returns the number of replicas with rows; in training 0 unless all have rows."""
    loop = innermost_loop() if is_training() else None
    if not (loop or is_multi_worker(strategy)):
        return original(strategy, input_workers, optionals)
    with tf.device("CPU:0"):
        count = tf.add_n([has_rows(one) for local in optionals for one in local])
    if loop is None:
        return SITES.around(
            "sum of replicas with rows",
            lambda _: original(strategy, input_workers, optionals),
            count,
        )
    replicas = strategy.num_replicas_in_sync
    signals = loop.signals
    if signals:
        own = tf.one_hot(signals.rank, signals.num_workers, tf.cast(count, tf.int32))
        counts = tf.cast(signals.sum(own, "fit/replicas with rows"), tf.int64)
        signals.note_missing_rows(counts, replicas // signals.num_workers)
        count = tf.reduce_sum(counts)
    progress = _progress_of(strategy)
    progress.assign([progress[0] + tf.cast(count == replicas, tf.int64), count])
    return tf.where(count == replicas, count, tf.zeros_like(count))


def has_rows(optional: tf.experimental.Optional) -> tf.Tensor:
    """Returns 1 if an optional batch has rows, otherwise 0."""
    return tf.cond(
        optional.has_value(),
        lambda: tf.cast(count_rows(optional.get_value()) > 0, tf.int64),
        lambda: tf.constant(0, tf.int64),
    )


def count_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch; 1 if nothing in it has rows."""
    for leaf in keras.tree.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows(tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0]
    return tf.constant(1, tf.int64)
