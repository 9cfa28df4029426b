"""Datasets and iterators of a strategy: what they do when the data end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib

from tfgradcomp.compat.replace import replace

replace_next_batch = functools.partial(
    replace, input_lib.DistributedIteratorBase, "get_next"
)
"""Makes all strategies' iterators advance by `function(original, iterator, name=None)`.

TensorFlow hands out empty batches to replicas whose data have ended; it has no option
to end the iteration for all.
"""

replace_count_of_replicas_with_data = functools.partial(
    replace, input_lib, "_calculate_replicas_with_values"
)
"""Replaces the count of replicas with data, by which an iteration goes on or ends.

The function is called as `function(original, strategy, input_workers, optionals)`.
"""


def replace_iteration(function: Callable) -> None:
    """Makes all strategies' datasets be iterated by `function(original, dataset)`.

    TensorFlow waits while it removes an iterator; it has no option not to.
    """
    replace(input_lib.DistributedDataset, "__iter__", function)
    replace(input_lib.DistributedDatasetsFromFunction, "__iter__", function)


def has_optional_batches(iterator: Any) -> bool:
    """Returns whether replicas of an iterator may have no data in a batch.

    TensorFlow decides it by the cardinality and does not show the decision.
    """
    return iterator._enable_get_next_as_optional


def is_endless(dataset: Any) -> bool:
    """Returns whether a strategy's dataset is known to have no end.

    The public `cardinality` raises before the dataset is built and may be missing.
    """
    return getattr(dataset, "_cardinality", None) == tf.data.INFINITE_CARDINALITY


def expect_end(dataset: Any) -> None:
    """Makes a strategy's endless dataset be read as if it could end.

    Otherwise TensorFlow does not ask other workers whether their data have ended.
    """
    dataset._cardinality = tf.data.UNKNOWN_CARDINALITY
    dataset._enable_get_next_as_optional = True


def specs_of_replica(dataset: Any) -> list[tf.TypeSpec]:
    """Returns the specifications of a replica's batch, flattened.

    The public `element_spec` nests the specifications of all local replicas in a
    private type.
    """
    return [
        spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
        for spec in tf.nest.flatten(dataset.element_spec)
    ]


def make_batches_optional(strategy: tf.distribute.MirroredStrategy) -> None:
    """Makes replicas expect the end of any finite dataset, as in several processes."""
    extended = strategy.extended
    distribute = extended._experimental_distribute_dataset

    def distribute_with_optional_batches(dataset, *args):
        # A thread for each replica would tune it.
        dataset = distribute(_without_tuning(dataset), *args)
        if not is_endless(dataset):
            dataset._enable_get_next_as_optional = True
        return dataset

    extended._experimental_distribute_dataset = distribute_with_optional_batches


def tune_only_given_datasets() -> None:
    """Makes TensorFlow tune datasets that programs make, and no others.

    It waits for the end of each thread that tunes. Keras' pipelines of arrays and
    generators, and the one that hands out batches to a device, have nothing to tune,
    and take no options.
    """
    for kind in (ArrayDataAdapter, GeneratorDataAdapter, PyDatasetAdapter):
        replace(kind, "get_tf_dataset", _make_without_tuning)
    replace(multi_device_iterator_ops, "_create_device_dataset", _make_without_tuning)


def _make_without_tuning(original, *args):
    return _without_tuning(original(*args))


def _without_tuning(dataset):
    if dataset.options().autotune.enabled is None:
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return dataset


def raise_end_of_data() -> tf.Tensor:
    """Raises `OutOfRangeError`, also inside of a graph; returns what is never computed.

    TensorFlow has no operation for it, and no public handle of an iterator. An
    iterator's `get_next` may be traced some thirty times only.
    """
    (nothing,) = tf.raw_ops.IteratorGetNext(
        iterator=_exhausted()._iterator_resource,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return nothing


@functools.cache
def _exhausted() -> Any:
    with tf.init_scope(), tf.device("CPU:0"):
        return iter(tf.data.Dataset.range(0))
