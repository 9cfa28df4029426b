"""Updates of several batches each, on workers and a server of one process."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.parameter_server import in_process
from tests.parameter_server.in_process import weights
from tfgradcomp.compressors import Identity
from tfgradcomp.parameter_server.rounds import BarrierRounds, PushRounds
from tfgradcomp.servers import Mean

SIZE = 64
GRADIENTS = np.random.default_rng(0).normal(size=(2, 8, SIZE)).astype(np.float32)

pytestmark = pytest.mark.timeout(120)


class Batches(keras.callbacks.Callback):
    """The batches that callbacks are informed of."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append(batch)


def make_rounds(kind, make_inner):
    """Rounds of two workers, each with its row of `GRADIENTS`."""
    channel, batches = in_process.make_channel(kind), Batches()
    workers = [
        in_process.make_worker(
            kind,
            channel,
            rank,
            functools.partial(
                tfgradcomp.CompressedOptimizer,
                make_inner(),
                Identity(),
                Mean(),
                min_size=0,
            ),
            in_process.make_linear_model(SIZE),
            in_process.batches_of(gradients),
            loss=in_process.output,
            device=in_process.WORKERS[rank],
        )
        for rank, gradients in enumerate(GRADIENTS)
    ]
    rounds = in_process.make_rounds(kind, channel, workers, callbacks=[batches])
    return rounds, workers, batches.heard


@pytest.mark.slow
def test_a_round_takes_the_mean_of_batches_and_drops_those_of_an_ended_round():
    def make_adam():
        return keras.optimizers.Adam(0.1, gradient_accumulation_steps=3, use_ema=True)

    rounds, workers, heard = make_rounds(BarrierRounds, make_adam)
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


@pytest.mark.slow
def test_without_a_barrier_a_push_takes_the_mean_of_batches():
    rounds, workers, heard = make_rounds(
        PushRounds, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    taken, logs = rounds.run(0, 8)
    assert (taken, heard) == (8, [1, 3, 5, 7])
    # The faster worker pushed more often: each worker made the first of its pushes.
    total = 0.0
    for worker, gradients in zip(workers, GRADIENTS, strict=True):
        requested, received = worker.batches()
        assert requested == received and requested % 2 == 0
        total += gradients[:requested].sum(0) / 2
    for worker in workers:
        np.testing.assert_allclose(weights(worker), -total, atol=1e-5)
        assert int(worker.optimizer.iterations.numpy()) == worker.rounds() == 4
    np.testing.assert_array_equal(weights(workers[0]), weights(workers[1]))
    stale = sum(worker.staleness for worker in workers)
    assert logs["staleness"] == pytest.approx(stale / 4)
