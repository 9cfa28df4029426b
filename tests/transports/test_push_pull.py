"""Pushes in a known order, on workers and servers of one process."""

import threading
import uuid

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tfgradcomp.distribute.asynchronous import asynchronous
from tfgradcomp.distribute.remote_worker import RemoteWorker
from tfgradcomp.transports import Log, LogCollectives, PushPull

SIZE = 4096


@pytest.fixture(params=[1, 2])
def log(request):
    """A log of two workers, on one server and on two."""
    return Log(uuid.uuid4().hex, ["CPU:0"] * request.param, 2, {})


def make_worker(log, rank, gradients):
    """A worker whose gradients are the rows given, and whose rate is 1."""
    optimizer = asynchronous(tfgradcomp.TernGrad)(
        keras.optimizers.SGD(1.0), clip_factor=None
    )
    optimizer.transport = PushPull(LogCollectives(log, rank))
    model = keras.Sequential(
        [
            keras.Input((SIZE,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(optimizer, loss=lambda y_true, y_pred: y_pred)
    worker = RemoteWorker("CPU:0", model)
    x = np.array(gradients, np.float32)[:, np.newaxis]
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros([len(x), 1, 1]))).repeat()
    worker.open(lambda context: data, 2, rank)
    worker.join(log, rank)
    return worker


def weights(worker):
    return worker.model.get_weights()[0][:, 0].copy()


def test_scales_are_those_last_seen_and_all_apply_the_same_log(log):
    sign = np.where(np.random.default_rng(0).random(SIZE) < 0.5, -1, 1)
    first = make_worker(log, 0, [1.0 * sign, 0.5 * sign, 0.25 * sign])
    second = make_worker(log, 1, [3.0 * sign, 0.125 * sign])
    threads = [
        threading.Thread(target=function, daemon=True)
        for server in range(len(log.devices))
        for function in log.serve(server).values()
    ]
    for thread in threads:
        thread.start()

    def push(worker):
        before = weights(worker)
        worker.run(1)
        return -(weights(worker) - before) * sign

    # Who has seen no scale of the other uses its own: codes without chance.
    np.testing.assert_array_equal(push(first), 1.0)
    np.testing.assert_array_equal(push(second), 1.0 + 3.0)
    np.testing.assert_array_equal(push(first), 3.0 + 0.5)
    # The first worker has seen 3, the second one 1.
    third = push(first)
    assert {*third} == {0.0, 3.0}
    fourth = push(second) - (0.5 + third)
    assert {*fourth} == {0.0, 1.0}
    # The larger scale leaves the mean as it is.
    for sent, mean, scale in ((third, 0.25, 3.0), (fourth, 0.125, 1.0)):
        deviation = np.sqrt(mean * (scale - mean) / SIZE)
        assert abs(sent.mean() - mean) < 4 * deviation

    log.stop()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    log.end()
    first.drain()
    second.drain()
    np.testing.assert_array_equal(weights(first), weights(second))
    total = 1.0 + 3.0 + 0.5 + third + fourth
    np.testing.assert_array_equal(weights(first), -sign * total)
    for worker, stale in ((first, 0 + 1 + 0), (second, 1 + 2)):
        assert int(worker.optimizer.staleness.numpy()) == stale
        assert int(worker.optimizer.iterations.numpy()) == 5
    log.free()
