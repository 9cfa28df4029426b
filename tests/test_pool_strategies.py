"""The pool's workers under TensorFlow's strategies."""

import logging

import keras
import numpy as np
import tensorflow as tf

from tests.cluster import strategy_and_rank


def sum_of_ranks():
    strategy, rank = strategy_and_rank()
    context = tf.distribute.get_replica_context
    total = strategy.run(
        tf.function(
            lambda: context().all_reduce(
                "sum", tf.cast(context().replica_id_in_sync_group, tf.int32)
            )
        )
    )
    local = strategy.experimental_local_results(total)
    return rank, [int(value) for value in local]


def spoil():
    keras.mixed_precision.set_global_policy("mixed_float16")
    tf.config.run_functions_eagerly(True)
    logging.info("configures the root logger")
    return float(np.random.random())


def look():
    return (
        keras.config.dtype_policy().name,
        tf.config.functions_run_eagerly(),
        keras.layers.Dense(1).name,
        len(logging.getLogger().handlers),
        float(np.random.random()),
    )


def test_workers_of_a_cluster_reduce_and_forget(pools):
    pool = pools(2)
    for _ in range(2):
        assert pool.run(sum_of_ranks).answers == [(0, [1]), (1, [1])]
    (first, again), _ = pool.run(spoil)
    assert first == again
    for answer in pool.run(look).answers:
        assert answer == ("float32", False, "dense", 0, first)


def test_devices_of_one_process_reduce(pools):
    assert pools(2, "mirrored").run(sum_of_ranks).answers == [(0, [1, 1])]


def test_a_pool_of_a_size_is_one(pools):
    assert pools(2) is pools(2)
    assert pools(2) is not pools(3)
