"""Workers that move from one channel to another, in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tests.methods import ROWS
from tests.parameter_server import in_process
from tfgradcomp.parameter_server.rounds import BarrierRounds

FEATURES = 2000


def make_model():
    """A model with a kernel that is compressed and a bias that is not."""
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((FEATURES,)), dense])


def dataset():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).repeat()


# A first round, and states of workers and servers.
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["TernGrad", "DistEFBlockSGDM"])
def test_a_worker_keeps_its_state_when_the_workers_change(name):
    make_optimizer, kind = ROWS[name].make_to_train, BarrierRounds
    alone = make_model()
    alone.compile(make_optimizer(), "mse")
    alone.fit(dataset(), steps_per_epoch=6, verbose=0, shuffle=False)

    larger = in_process.make_channel(kind, servers=2, workers=3)
    worker = in_process.make_worker(
        kind, larger, 2, make_optimizer, make_model(), dataset()
    )
    larger.queues.free()
    states = {}
    for servers in (2, 3):
        smaller = in_process.make_channel(kind, servers, 1, states)
        worker.join(smaller, 0)
        buckets = worker.optimizer.stepper.buckets
        assert {bucket.route.num_workers for bucket in buckets} == {1}
        in_process.take_steps(smaller, [worker], 3)
        states = smaller.states.whole(worker.committed_steps(), worker.kept_states())
        smaller.queues.free()
    for found, expected in zip(worker.model.weights, alone.weights, strict=True):
        assert bits(found.numpy()) == bits(expected.numpy())
    assert int(worker.optimizer.iterations.numpy()) == 6
