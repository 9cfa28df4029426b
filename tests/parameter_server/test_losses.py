"""Tasks that are killed while they train."""

from pathlib import Path

import numpy as np
import pytest

from tests.cluster import run_workers

SCRIPT = Path(__file__).parent / "loss_worker.py"
ROUNDS = 24
SLOW = pytest.mark.slow

pytestmark = pytest.mark.timeout(300)


def train(folder, mode, on_worker_loss, *tasks, restarts=0):
    (answer,), output = run_workers(
        *(SCRIPT, 3, folder, mode, on_worker_loss, *tasks),
        servers=1,
        options=["--max-restarts", str(restarts)],
    )
    return answer, output


# `test_membership` loses workers in one process, `test_faults` stops real workers.
@SLOW
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_continues_without_lost_workers_and_readmits_them(tmp_path, mode):
    # The first killed worker is the one whose weights others receive.
    answer, output = train(
        *(tmp_path, mode, "continue", "worker 0 back", "worker 1 then worker 2"),
        restarts=1,
    )
    assert "continuing with 2 worker(s)" in output
    assert "back: /job:worker/replica:0/task:0" in output
    lost = "/job:worker/replica:0/task:1, /job:worker/replica:0/task:2"
    assert f"lost {lost}; continuing with 1 worker(s)" in output
    assert answer["iterations"] == ROUNDS
    assert answer["workers"] == [answer["chief"]]
    assert np.isfinite(answer["loss"]).all()
    if mode == "sync":
        # Without a barrier the result depends on the order of pushes.
        assert answer["loss"][-1] < answer["loss"][0]


@SLOW
def test_wait_resumes_when_the_worker_is_restarted(tmp_path):
    answer, output = train(tmp_path, "async", "wait", "worker 1", restarts=1)
    assert "waiting for their restart" in output
    assert answer["iterations"] == ROUNDS
    assert len(answer["workers"]) == 3
    assert len({*answer["workers"], answer["chief"]}) == 1


# `test_faults` checks that a killed chief resumes with all residuals.
@SLOW
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_resumes_from_a_backup_after_a_server_is_lost(tmp_path, mode):
    answer, _ = train(tmp_path, mode, "continue", "nobody 0", "ps 0")
    assert "Parameter servers are gone" in answer["error"]
    assert "/job:ps/replica:0/task:0" in answer["error"]
    answer, _ = train(tmp_path, mode, "continue")
    # The saved first epoch is not repeated.
    assert len(answer["loss"]) == 2
    assert answer["iterations"] == ROUNDS
    assert len({*answer["workers"], answer["chief"]}) == 1
    if mode == "sync":
        # Residuals of workers and servers were saved, too.
        assert answer["workers"] == answer["uninterrupted"]["workers"]
