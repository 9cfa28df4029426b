"""Workers that move from one channel to another, in one process."""

import threading
import uuid

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tests.methods import ROWS
from tfgradcomp.parameter_server.remote_worker import RemoteWorker
from tfgradcomp.parameter_server.round_channel import RoundChannel
from tfgradcomp.parameter_server.transport import ParameterServer

FEATURES = 2000
# A first round, and states of workers and servers.
METHODS = ("TernGrad", "DistEFBlockSGDM")


def make_model(optimizer):
    """A model with a kernel that is compressed and a bias that is not."""
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(optimizer, "mse")
    return model


def dataset(context=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).repeat()


def run_steps(worker, channel, steps):
    """Takes steps of the only worker of a channel."""
    threads = [
        threading.Thread(
            target=channel.serve(index), args=[tf.constant(steps)], daemon=True
        )
        for index in range(len(channel.devices))
    ]
    for thread in threads:
        thread.start()
    worker.run(steps)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", METHODS)
def test_a_worker_keeps_its_state_when_the_workers_change(name):
    make_optimizer = ROWS[name].make_to_train
    alone = make_model(make_optimizer())
    alone.fit(dataset(), steps_per_epoch=6, verbose=0, shuffle=False)

    def channel_of(num_workers, num_servers, states):
        devices = ["CPU:0"] * num_servers
        return RoundChannel(uuid.uuid4().hex, devices, num_workers, states)

    larger = channel_of(3, 2, {})
    optimizer = make_optimizer(transport=ParameterServer.at(larger, 2))
    worker = RemoteWorker("CPU:0", make_model(optimizer))
    worker.open(dataset, 1, 0)
    worker.join(larger, 2)
    larger.queues.free()
    states = {}
    for num_servers in (2, 3):
        smaller = channel_of(1, num_servers, states)
        worker.join(smaller, 0)
        assert {bucket.route.num_workers for bucket in optimizer.stepper.buckets} == {1}
        run_steps(worker, smaller, 3)
        states = smaller.states.whole(worker.committed_steps(), worker.kept_states())
        smaller.queues.free()
    for found, expected in zip(worker.model.weights, alone.weights, strict=True):
        assert bits(found.numpy()) == bits(expected.numpy())
    assert int(optimizer.iterations.numpy()) == 6
