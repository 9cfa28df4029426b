"""The middle of a training's life: each wrapper does what Keras' optimizers do."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.optimizers import life_cases
from tests.selection import select
from tfgradcomp.transports import AllGather

# Each takes twenty trainings. Of rows with equal needs one is enough, and one that
# draws random numbers.
NAMES = [row.name for row in select(by=lambda row: (row.needs, row.is_random))]
CASES = [*itertools.product((*NAMES, *life_cases.OTHERS), (1, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_life(pools, name, workers):
    (failures,), _ = pools(workers, "virtual").run(life_cases.run, name, timeout=900)
    assert not failures, "\n".join(failures.values())


@pytest.mark.parametrize("name", ["TernGrad", "LocalSteps", "OneBitAdam", "OneBitLAMB"])
@pytest.mark.parametrize("shapes", [[(0, 4)], [(5,), (0, 4)]])
def test_variables_without_elements(name, shapes):
    optimizer = life_cases.make_optimizer(name)
    variables = [keras.Variable(np.ones(shape, "float32")) for shape in shapes]
    for _ in range(3):
        optimizer.apply([tf.ones(shape) for shape in shapes], variables)
    assert int(optimizer.iterations) == 3
    assert all(np.all(variable.numpy() != 1) for variable in variables)


def test_two_optimizers_with_one_transport(pools):
    virtual = pools(2, "virtual")
    (shared,), _ = virtual.run(life_cases.share, AllGather, timeout=60)
    (separate,), _ = virtual.run(life_cases.share, life_cases.by_name, timeout=60)
    for one, other in zip(shared, separate, strict=True):
        np.testing.assert_array_equal(one, other)


def test_onebit_adam_leaves_the_optimizer_that_it_wraps_as_it_was():
    adam, variable = keras.optimizers.Adam(0.1), keras.Variable([1.0, 2.0])
    onebit = tfgradcomp.OneBitAdam(adam, 1, min_size=1)
    velocities = []
    for apply in (onebit.apply, onebit.apply, adam.apply):
        apply([tf.constant([0.5, 2.0])], [variable])
        velocities.append(adam.variables[-1].numpy())
    # The second step is after the warm-up, where the variance is frozen.
    np.testing.assert_array_equal(velocities[0], velocities[1])
    assert np.all(velocities[2] > velocities[1])
