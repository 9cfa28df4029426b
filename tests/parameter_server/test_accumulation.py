"""Updates of several batches each, on workers and a server of one process."""

import uuid
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tfgradcomp.compressors import Identity
from tfgradcomp.parameter_server.push_log import PushLog
from tfgradcomp.parameter_server.round_channel import RoundChannel
from tfgradcomp.parameter_server.rounds import BarrierRounds, PushRounds
from tfgradcomp.servers import Mean

SIZE = 64
# Names of this process' only device, so that each task has one of its own.
WORKERS, SERVER = ("CPU:0", "/CPU:0"), "/device:CPU:0"
GRADIENTS = np.random.default_rng(0).normal(size=(2, 8, SIZE)).astype(np.float32)

pytestmark = pytest.mark.timeout(120)


class Batches(keras.callbacks.Callback):
    """The batches that the chief hears of."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append(batch)


def make_worker(kind, meeting, rank, inner):
    """A worker whose gradients are its row of `GRADIENTS`."""
    transport = kind.transport_class.at(meeting, rank)
    optimizer = tfgradcomp.CompressedOptimizer(
        inner, Identity(), Mean(), transport=transport, min_size=0
    )
    optimizer.stepper_class = transport.stepper_class
    model = keras.Sequential(
        [
            keras.Input((SIZE,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(optimizer, loss=lambda y_true, y_pred: y_pred)
    worker = kind.worker_class(WORKERS[rank], model)
    batches = GRADIENTS[rank][:, np.newaxis], np.zeros([8, 1, 1])
    worker.open(lambda _: tf.data.Dataset.from_tensor_slices(batches).repeat(), 2, rank)
    worker.join(meeting, rank)
    return worker


def make_rounds(kind, meeting, make_inner):
    workers = [make_worker(kind, meeting, rank, make_inner()) for rank in (0, 1)]
    membership = SimpleNamespace(
        workers=workers, channel=meeting, serving={SERVER: meeting.serve(0)}
    )
    batches = Batches()
    callbacks = keras.callbacks.CallbackList([batches], model=workers[0].model)
    callbacks.model.stop_training = False
    cluster = SimpleNamespace(check_servers=lambda: None)
    return kind(cluster, membership, callbacks, 1), workers, batches.heard


def weights(worker):
    return worker.model.get_weights()[0][:, 0]


def test_a_round_takes_the_mean_of_batches_and_forgets_those_of_an_ended_one():
    def make_adam():
        return keras.optimizers.Adam(0.1, gradient_accumulation_steps=3, use_ema=True)

    meeting = RoundChannel(uuid.uuid4().hex, ["/job:localhost/device:CPU:0"], 2, {})
    rounds, workers, heard = make_rounds(BarrierRounds, meeting, make_adam)
    # Batches that are only accumulated need no server; then a round fails.
    for worker in workers:
        worker.run(2)
        worker.drop_window()
    assert rounds.run(0, 6)[0] == rounds.run(3, 6)[0] == 3
    assert heard == [2, 5]
    alone, adam = keras.Variable(np.zeros([SIZE, 1], np.float32)), make_adam()
    adam.build([alone])
    for gradient in GRADIENTS.mean(0)[2:]:
        adam.apply([tf.constant(gradient[:, np.newaxis])])
    for worker in workers:
        np.testing.assert_allclose(weights(worker), alone.numpy()[:, 0], atol=1e-6)
        assert (worker.rounds(), worker.batches()) == (2, (8, 8))
        assert int(worker.optimizer.iterations.numpy()) == 2
    np.testing.assert_array_equal(weights(workers[0]), weights(workers[1]))


def test_without_a_barrier_a_push_takes_the_mean_of_batches():
    meeting = PushLog(uuid.uuid4().hex, ["/job:localhost/device:CPU:0"], 2, {})
    rounds, workers, heard = make_rounds(
        *(PushRounds, meeting),
        lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
    )
    taken, logs = rounds.run(0, 8)
    assert (taken, heard) == (8, [1, 3, 5, 7])
    # Whoever was quicker pushed more often: of each worker the first of its pushes.
    total = 0.0
    for worker, gradients in zip(workers, GRADIENTS, strict=True):
        asked, got = worker.batches()
        assert asked == got and asked % 2 == 0
        total += gradients[:asked].sum(0) / 2
    for worker in workers:
        np.testing.assert_allclose(weights(worker), -total, atol=1e-5)
        assert int(worker.optimizer.iterations.numpy()) == worker.rounds() == 4
    np.testing.assert_array_equal(weights(workers[0]), weights(workers[1]))
    stale = sum(worker.staleness for worker in workers)
    assert logs["staleness"] == pytest.approx(stale / 4)
