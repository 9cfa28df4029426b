"""Workers whose steps were traced for another worker, in one process."""

import threading
import uuid

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tests.methods import ROWS
from tfgradcomp.parameter_server.rounds import BarrierRounds, PushRounds
from tfgradcomp.parameter_server.worker_function import WorkerFunction

FEATURES, STEPS = 2000, 3


def data_of(rank):
    x = np.random.default_rng(rank).normal(size=(3, 8, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).repeat()


class Shift(keras.layers.Layer):
    """Adds constants to what it gets: more than TensorFlow copies into a function."""

    def __init__(self, amount):
        super().__init__()
        self.shift = tf.fill([FEATURES], amount)

    def call(self, inputs):
        return inputs + self.shift


def make_pair(kind, name="TernGrad", is_shared=True, more=lambda rank: []):
    """Two workers at a new meeting, and it; layers of `more` come before the last."""
    meeting = kind.transport_class.channel_class(uuid.uuid4().hex, ["CPU:0"], 2, {})
    workers = []
    for rank in (0, 1):
        transport = kind.transport_class.at(meeting, rank)
        optimizer = ROWS[name].make_to_train(transport=transport)
        optimizer.stepper_class = optimizer.transport.stepper_class
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                *more(rank),
                keras.layers.Dropout(0.5, seed=3),
                dense,
            ]
        )
        model.compile(optimizer, "mse")
        worker = kind.worker_class("CPU:0", model)
        worker.open(lambda _, rank=rank: data_of(rank), 2, rank)
        worker.join(meeting, rank, *(workers if is_shared else []))
        workers.append(worker)
    return workers, meeting


def train(workers, meeting):
    """Lets the workers take steps together; returns their weights and logs."""
    logs = [None, None]

    def run(rank):
        logs[rank] = workers[rank].named(workers[rank].run(STEPS))

    serve = meeting.serve(0)
    calls = [lambda: serve(tf.constant(STEPS)), lambda: run(0), lambda: run(1)]
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [[bits(w.numpy()) for w in one.model.weights] for one in workers], logs


# A first round with ranks in its random numbers; states of workers and servers; ties.
@pytest.mark.parametrize("name", ["TernGrad", "DistEFBlockSGDM", "Signum"])
def test_a_step_that_is_traced_once_has_each_worker_take_its_own(name):
    shared, alone = (
        make_pair(BarrierRounds, name, is_shared) for is_shared in (True, False)
    )
    assert shared[0][1].traced is shared[0][0].traced
    assert alone[0][1].traced is not alone[0][0].traced
    (weights, logs), expected = train(*shared), train(*alone)
    assert (weights, logs) == expected
    # Data, and what Dropout draws, are each worker's own.
    assert logs[0] != logs[1]
    assert [worker.batches() for worker in shared[0]] == [(STEPS, STEPS)] * 2


def test_the_steps_of_workers_that_wait_for_nobody_are_traced_once():
    (first, second), _ = make_pair(PushRounds)
    assert second.traced is first.traced
    assert {*first.traced} == {"run", "drain"}


def test_what_a_worker_alone_has_is_traced_for_it():
    def shifted(rank):
        return [Shift(float(rank))]

    shared, alone = (
        make_pair(BarrierRounds, is_shared=is_shared, more=shifted)
        for is_shared in (True, False)
    )
    assert shared[0][1].traced is not shared[0][0].traced
    assert train(*shared) == train(*alone)


def test_data_of_another_shape_are_traced_apart():
    (first, second), meeting = make_pair(BarrierRounds)
    second.close()
    second.open(lambda _: data_of(1).unbatch().batch(4).repeat(), 2, 1)
    second.join(meeting, 1, first)
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
