"""Workers whose steps were traced for another worker, in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tests.methods import ROWS
from tests.parameter_server import in_process
from tfgradcomp.parameter_server.rounds import BarrierRounds, PushRounds
from tfgradcomp.parameter_server.worker_function import WorkerFunction

FEATURES, STEPS = 2000, 3


def data_of(rank):
    x = np.random.default_rng(rank).normal(size=(3, 8, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).repeat()


class Shift(keras.layers.Layer):
    """Adds a constant too large for TensorFlow to copy into a function."""

    def __init__(self, amount):
        super().__init__()
        self.shift = tf.fill([FEATURES], amount)

    def call(self, inputs):
        return inputs + self.shift


def make_pair(kind, name="TernGrad", is_shared=True, more=lambda rank: []):
    """Two workers on a new channel, and the channel; `more` adds layers."""
    channel, workers = in_process.make_channel(kind), []
    for rank in (0, 1):
        layers = [
            keras.Input((FEATURES,)),
            *more(rank),
            keras.layers.Dropout(0.5, seed=3),
            keras.layers.Dense(1, kernel_initializer="zeros"),
        ]
        worker = in_process.make_worker(
            kind,
            channel,
            rank,
            ROWS[name].make_to_train,
            keras.Sequential(layers),
            data_of(rank),
            *(workers if is_shared else []),
        )
        workers.append(worker)
    return workers, channel


def train(workers, channel):
    """Lets the workers take steps together; returns their weights and logs."""
    values = in_process.take_steps(channel, workers, STEPS)
    logs = [w.named(of_worker) for w, of_worker in zip(workers, values, strict=True)]
    return [[bits(v.numpy()) for v in worker.model.weights] for worker in workers], logs


# A first round with ranks in its random numbers; states of workers and servers; ties.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["TernGrad", "DistEFBlockSGDM", "Signum"])
def test_workers_that_share_a_trace_take_their_own_steps(name):
    shared, alone = (
        make_pair(BarrierRounds, name, is_shared) for is_shared in (True, False)
    )
    assert shared[0][1].traced is shared[0][0].traced
    assert alone[0][1].traced is not alone[0][0].traced
    (weights, logs), expected = train(*shared), train(*alone)
    assert (weights, logs) == expected
    # Each worker has its own data and its own masks of Dropout.
    assert logs[0] != logs[1]
    assert [worker.batches() for worker in shared[0]] == [(STEPS, STEPS)] * 2


def test_steps_without_a_barrier_are_traced_once():
    (first, second), _ = make_pair(PushRounds)
    assert second.traced is first.traced
    assert {*first.traced} == {"run", "drain"}


def test_a_constant_of_one_worker_is_traced_for_it():
    def shifted(rank):
        return [Shift(float(rank))]

    shared, alone = (
        make_pair(BarrierRounds, is_shared=is_shared, more=shifted)
        for is_shared in (True, False)
    )
    assert shared[0][1].traced is not shared[0][0].traced
    assert train(*shared) == train(*alone)


def test_data_of_another_shape_are_traced_separately():
    (first, second), channel = make_pair(BarrierRounds)
    second.close()
    second.open(lambda _: data_of(1).unbatch().batch(4).repeat(), 2, 1)
    second.join(channel, 1, first)
    assert second.traced is not first.traced


def test_a_function_that_names_a_worker_stays_with_it():
    iterator = iter(data_of(0))
    (free, bound) = (
        WorkerFunction(lambda rank, _, device=device: _on(device, rank), iterator)
        for device in ("CPU:0", "/job:worker/replica:0/task:0/device:CPU:0")
    )
    assert free.fits({})
    assert not bound.fits({})
    assert free.on("CPU:0", 7, iterator, {})().numpy() == 7


def _on(device, rank):
    with tf.device(device):
        return tf.identity(rank)
