"""Pushes in a known order, on workers and servers of one process."""

import copy
import functools

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.methods import ROWS
from tests.parameter_server import in_process
from tests.parameter_server.in_process import weights
from tests.selection import rows_in_turns
from tfgradcomp.parameter_server.rounds import PushRounds

SIZE = 4096


make_log = functools.partial(in_process.make_channel, PushRounds)


def make_worker(log, rank, gradients, make_optimizer):
    """A worker with these gradients."""
    model, data = in_process.make_linear_model(SIZE), in_process.batches_of(gradients)
    return in_process.make_worker(
        *(PushRounds, log, rank, make_optimizer, model, data), loss=in_process.output
    )


def start(log):
    """Starts the servers; returns a function that waits for their end."""
    return in_process.start_threads([log.serve(k) for k in range(len(log.devices))])


def finish(log, wait, workers):
    """Ends the log; all workers apply the rest of it."""
    log.stop()
    wait()
    log.end()
    for worker in workers:
        worker.drain()
    log.queues.free()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_workers_use_the_last_known_scales_and_apply_one_log(servers):
    log, row = make_log(servers), ROWS["TernGrad, not clipped"]
    sign = np.where(np.random.default_rng(0).random(SIZE) < 0.5, -1, 1)
    first, second = (
        make_worker(
            log,
            rank,
            gradients,
            functools.partial(row.make, keras.optimizers.SGD(1.0)),
        )
        for rank, gradients in enumerate(
            ([1.0 * sign, 0.5 * sign, 0.25 * sign], [3.0 * sign, 0.125 * sign])
        )
    )
    wait = start(log)

    def push(worker):
        before = weights(worker)
        worker.run(1)
        return -(weights(worker) - before) * sign

    # A worker that has seen no other scale uses its own, without random codes.
    np.testing.assert_array_equal(push(first), 1.0)
    np.testing.assert_array_equal(push(second), 1.0 + 3.0)
    np.testing.assert_array_equal(push(first), 3.0 + 0.5)
    # The first worker has seen 3, the second one 1.
    third = push(first)
    assert {*third} == {0.0, 3.0}
    fourth = push(second) - (0.5 + third)
    assert {*fourth} == {0.0, 1.0}
    # The larger scale does not change the mean.
    for sent, mean, scale in ((third, 0.25, 3.0), (fourth, 0.125, 1.0)):
        deviation = np.sqrt(mean * (scale - mean) / SIZE)
        assert abs(sent.mean() - mean) < 4 * deviation

    finish(log, wait, (first, second))
    total = 1.0 + 3.0 + 0.5 + third + fourth
    for worker, stale in ((first, 0 + 1 + 0), (second, 1 + 2)):
        np.testing.assert_array_equal(weights(worker), -sign * total)
        assert worker.staleness == stale
        assert int(worker.optimizer.iterations.numpy()) == 5


@pytest.mark.slow
@rows_in_turns(
    "servers",
    [1, 2],
    lambda row: not row.method.needs_whole_tensors,
    lambda row: row.needs,
)
def test_a_single_pusher_trains_as_one_worker(servers, row):
    log = make_log(servers)
    gradients = np.random.default_rng(0).normal(size=(3, SIZE))
    alone = in_process.make_linear_model(SIZE)
    alone.compile(row.make_to_train(), in_process.output)
    data = in_process.batches_of(gradients)
    alone.fit(data, steps_per_epoch=3, verbose=0, shuffle=False)
    pair = [make_worker(log, k, gradients, row.make_to_train) for k in (0, 1)]
    wait = start(log)
    pair[0].run(3)
    finish(log, wait, pair)
    expected = alone.get_weights()[0][:, 0]
    assert np.count_nonzero(expected) > SIZE / 4
    for worker in pair:
        np.testing.assert_array_equal(weights(worker), expected)
        assert int(worker.optimizer.iterations.numpy()) == 3


def test_pushes_of_accumulated_gradients_that_vary_in_length():
    log, sgd = make_log(2), keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    # Worker 0 has five batches and a NaN, worker 1 two batches.
    given = np.random.default_rng(0).normal(size=(8, SIZE)).astype(np.float32)
    given[3, 7] = np.nan
    pair = [
        make_worker(
            log,
            rank,
            gradients,
            functools.partial(
                tfgradcomp.Strom, copy.deepcopy(sgd), threshold=0.5, nonfinite="skip"
            ),
        )
        for rank, gradients in enumerate((given[:6], given[6:]))
    ]
    wait = start(log)
    order, total, sent = [0, 1, 0, 0], np.zeros(SIZE), []
    residual, taken = np.zeros([2, SIZE], np.float32), [0, 6]
    for rank in order:
        before = weights(pair[rank])
        pair[rank].run(1)
        # A batch that does not complete a push changes no weight.
        np.testing.assert_array_equal(weights(pair[rank]), before)
        pair[rank].run(1)
        mean = given[taken[rank] : taken[rank] + 2].mean(0)
        taken[rank] += 2
        if not np.isfinite(mean).all():
            continue
        residual[rank] += mean
        code = 0.5 * np.sign(residual[rank]) * (np.abs(residual[rank]) > 0.5)
        residual[rank] -= code
        total += code
        sent.append(np.count_nonzero(code))
        np.testing.assert_array_equal(weights(pair[rank]), -total)
    finish(log, wait, pair)
    for worker, stale in zip(pair, (1, 1), strict=True):
        np.testing.assert_array_equal(weights(worker), -total)
        assert int(worker.optimizer.iterations.numpy()) == 3
        assert worker.optimizer.skipped_steps == 1
        assert worker.rounds() == 4
        assert worker.staleness == stale
    # Each server receives a header, a rank, an endpoint and a length.
    traffic = pair[1].optimizer.traffic
    assert traffic.words_sent == 2 * (7 + 2 + 1) + sent[1]
    assert traffic.words_received == 2 * (1 + 1) + sent[1]
    assert traffic.elements_sent == sent[1]
