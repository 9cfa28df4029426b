"""Training without a barrier, on workers and a server of one process."""

import functools
import os
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.methods import ROWS
from tests.parameter_server import in_process
from tests.parameter_server.in_process import SERVER, WORKERS
from tfgradcomp.collectives.stalls import EXIT_CODE
from tfgradcomp.parameter_server.membership import Membership
from tfgradcomp.parameter_server.push_log import bound_of_staleness
from tfgradcomp.parameter_server.rounds import PushRounds

SIZE = 64
MANY = 100_000

pytestmark = pytest.mark.timeout(120)


def dataset(rank, seconds):
    """Batches that each take some seconds."""

    def late(x):
        time.sleep(seconds)
        return x

    def with_targets(x):
        x = tf.ensure_shape(x, [8, SIZE])
        return x, x[:, :1]

    x = np.random.default_rng(rank).normal(size=(4, 8, SIZE)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices(x).repeat()
    if seconds:
        data = data.map(lambda x: tf.numpy_function(late, [x], tf.float32))
    return data.map(with_targets)


def make_rounds(log, steps_per_execution, seconds=(0, 0)):
    """Rounds of two workers; servers keep a state of their method."""
    workers = [
        in_process.make_worker(
            PushRounds,
            log,
            rank,
            ROWS["DistEFBlockSGDM"].make_to_train,
            keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(1)]),
            dataset(rank, late),
            device=WORKERS[rank],
        )
        for rank, late in enumerate(seconds)
    ]
    return in_process.make_rounds(
        PushRounds, log, workers, steps_per_execution
    ), workers


make_log = functools.partial(in_process.make_channel, PushRounds)


def weights(worker):
    return worker.model.get_weights()[0]


def test_a_worker_ahead_waits_before_others_become_stale():
    rounds, workers = make_rounds(make_log(max_staleness=2), 4, seconds=(0, 0.05))
    start = weights(workers[0]).copy()
    workers[1].model.set_weights(workers[0].model.get_weights())
    seen = {0: [], 1: []}
    for rank, worker in enumerate(workers):

        def run(steps, worker=worker, stale=seen[rank], run=worker.run):
            before = worker.staleness
            values = run(steps)
            stale.append(worker.staleness - before)
            return values

        worker.run = run
    taken = rounds.take(0, 40)
    assert not taken.errors and taken.steps == 40
    # Of four pushes each; if no worker waited, the first would take all but four.
    assert max(seen[0] + seen[1]) == 4 * 2
    assert [int(w.optimizer.iterations.numpy()) for w in workers] == [40, 40]
    np.testing.assert_array_equal(weights(workers[0]), weights(workers[1]))
    assert not np.array_equal(weights(workers[0]), start)


def test_a_server_error_is_raised_while_workers_push():
    log, answers = make_log(), tf.Variable(0)
    push = log.push

    def push_to_failing(name, endpoint, rank, messages):
        def answer(server, rows):
            is_good = tf.less(answers.assign_add(1), 5)
            with tf.control_dependencies(
                [tf.debugging.Assert(is_good, ["sentence of the server"])]
            ):
                return endpoint.answer(server, tf.identity(rows))

        return push(name, endpoint._replace(answer=answer), rank, messages)

    log.push = push_to_failing
    rounds, workers = make_rounds(log, 1)
    taken = rounds.take(0, MANY)
    assert {*taken.errors} == {SERVER, *WORKERS}
    assert all(int(w.optimizer.iterations.numpy()) <= 4 for w in workers)
    cluster = SimpleNamespace(lost=lambda errors: set())
    membership = Membership(cluster, None, None, None, waits_for_lost=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="sentence of the server"):
        membership.recover(taken.errors)


def test_a_lost_worker_does_not_block_others():
    rounds, (first, second) = make_rounds(make_log(max_staleness=2), 1)
    run = first.run

    def run_until_lost(steps):
        if second.rounds() > 2:
            raise tf.errors.UnavailableError(None, None, "lost")
        return run(steps)

    first.run = run_until_lost
    taken = rounds.take(0, MANY)
    assert {*taken.errors} == {first.device} and taken.steps == 0
    # The other worker has applied its pushes up to then.
    assert 2 < second.rounds() < MANY


@pytest.mark.slow
def test_workers_that_wait_for_a_dataset_are_named(monkeypatch, caplog):
    monkeypatch.setenv("TFGRADCOMP_STALL_WARNING", "0.4")
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code))
    codes = []
    rounds, _ = make_rounds(make_log(), 1, seconds=(2.5, 2.5))
    monkeypatch.setenv("TFGRADCOMP_STALL_TIMEOUT", "1")
    assert rounds.take(0, 2).steps == 2
    # On a loaded machine, a line about tracing comes first.
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("no worker has made progress for")
    late = f"{', '.join(WORKERS)} waiting for the dataset"
    assert any(line.endswith(late) for line in said)
    assert {*codes} == {EXIT_CODE}
    assert "Received: TFGRADCOMP_STALL_TIMEOUT=1" in caplog.text


def test_staleness_has_a_bound_by_default():
    assert bound_of_staleness(None, 3) == 24
    assert bound_of_staleness(3, 3) == 3
    with pytest.raises(ValueError, match="max_staleness.*Received: max_staleness=2"):
        bound_of_staleness(2, 3)
