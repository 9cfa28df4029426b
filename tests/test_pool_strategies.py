"""The pool's workers under TensorFlow's strategy."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster import strategy_and_rank


def leave_global_state():
    keras.mixed_precision.set_global_policy("mixed_float16")
    tf.config.run_functions_eagerly(True)
    logging.info("configures the root logger")
    return float(np.random.random())


def global_state():
    _, rank = strategy_and_rank()
    return (
        rank,
        keras.config.dtype_policy().name,
        tf.config.functions_run_eagerly(),
        keras.layers.Dense(1).name,
        len(logging.getLogger().handlers),
        float(np.random.random()),
    )


@pytest.mark.slow
def test_calls_begin_with_the_same_global_state(pools):
    drawn = pools(2).run(leave_global_state).answers
    for rank, state in enumerate(pools(2).run(global_state).answers):
        assert state == (rank, "float32", False, "dense", 0, drawn[0])
