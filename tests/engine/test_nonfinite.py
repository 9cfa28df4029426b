"""The check of gradients before a local step."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp.engine.nonfinite import are_finite

WORKERS = SimpleNamespace(num_workers=2, num_processes=2)


@pytest.mark.parametrize(
    "value, is_finite",
    [
        (1.0, True),
        # Its square overflows.
        (1e30, True),
        # Twice this does.
        (3e38, False),
        (-np.inf, False),
        (np.nan, False),
    ],
)
def test_gradients_are_checked_times_the_number_of_workers(value, is_finite):
    rows = tf.IndexedSlices(tf.constant([[0.0], [value]]), tf.constant([0, 2]))
    assert bool(are_finite([tf.ones([3]), rows], WORKERS)) == is_finite


@pytest.mark.parametrize(
    "others", [[], [tf.ones([3])]], ids=["alone", "beside float32"]
)
@pytest.mark.parametrize(
    "value, dtype, is_finite",
    [
        (30000.0, tf.float16, True),
        # Twice this is finite in float32.
        (40000.0, tf.float16, False),
        # This is not.
        (1e300, tf.float64, True),
        (np.inf, tf.float64, False),
        (3e38, tf.bfloat16, False),
    ],
)
def test_gradients_are_checked_in_their_own_type(others, value, dtype, is_finite):
    gradients = [tf.constant([1.0, value], dtype), *others]
    assert bool(are_finite(gradients, WORKERS)) == is_finite
