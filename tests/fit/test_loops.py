"""Loops on real workers end together, and statistics become equal."""

import numpy as np
import pytest

from tests.fit import loop_cases
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.reshard import reshard

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("way", "batches"),
    [
        # The flag travels with the logs of the step that follows.
        ("steps", [0, 1, 2]),
        pytest.param("loops", [1, 3], marks=pytest.mark.slow),
        pytest.param("eagerly", [0, 1, 2], marks=pytest.mark.slow),
    ],
)
def test_stop_of_one_worker_ends_fit_on_all(pools, way, batches):
    (first, second), output = pools(2).run(loop_cases.case_stop, way)
    assert first["batch"].pop("own_view") == first["epoch"].pop("own_view") == []
    # The callbacks of a worker see its own value at once.
    assert second["batch"].pop("own_view") == second["epoch"].pop("own_view") == [True]
    assert first == second
    assert first["batch"]["batches"] == batches
    assert (first["batch"]["epochs"], first["epoch"]["epochs"]) == (1, 2)
    assert first["batch"]["flag"] and first["epoch"]["flag"]
    line = "Received: stop_training=True on workers [1]"
    assert output.count(line) == 2
    assert "[0] tfgradcomp: `fit` ends on all workers" in output


@pytest.mark.slow
def test_stop_of_one_worker_ends_evaluate_and_predict_on_all(pools):
    (first, second), output = pools(2).run(loop_cases.case_stop_evaluation)
    assert first == second
    assert first["tests"] == [3, 3]
    assert first["rows"] == 36
    for flag in ("stop_evaluating", "stop_predicting"):
        assert f"{flag}=True on workers [1]" in output


@pytest.mark.parametrize(
    "way",
    [
        "steps",
        pytest.param("loops", marks=pytest.mark.slow),
        pytest.param("eagerly", marks=pytest.mark.slow),
    ],
)
def test_workers_with_data_of_different_lengths_end_epochs_together(pools, way):
    (first, second), output = pools(2).run(loop_cases.case_lengths, way)
    assert first == second
    # Each worker takes 6 rows of its 24 or 60; Keras counts batches of 12.
    last = {"known": 2, "unknown": 4, "mixed": 2}
    for name, run in first.items():
        step = 2 if way == "loops" else 1
        epoch = list(range(step - 1, last[name], step))
        assert run["batches"] == epoch * 2, name
        assert np.isfinite(run["history"]["val_loss"]).all()
    assert "batches by worker={0: '2', 1: '5'}" in output
    assert "batches by worker={0: '2', 1: 'unknown'}" in output
    assert output.count("Received: no rows on workers [0]") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("workers", "culprit", "what", "every", "batches"),
    [
        # The majority of three workers, when the epoch ends.
        (3, 0, "weight", None, [0, 1, 2, 3, 4]),
        (2, 1, "rate", 2, [0, 1]),
    ],
)
def test_a_worker_that_differs_from_the_others_is_named_on_all(
    pools, workers, culprit, what, every, batches
):
    path = {"weight": "second/kernel of", "rate": "learning_rate of"}[what]
    for error, seen in (
        pools(workers).run(loop_cases.case_other_worker, culprit, what, every).answers
    ):
        assert f"{path} workers [{culprit}] differs from the other workers'" in error
        assert seen == batches


@pytest.mark.sample(1)
@pytest.mark.parametrize("cluster", [(2,), (2, "mirrored")], ids=["two", "mirrored"])
def test_statistics_are_means_and_no_step_lacks_rows(pools, cluster, tmp_path):
    folder = str(tmp_path / "backup")
    answers, output = pools(*cluster).run(loop_cases.case_tail, folder)
    assert len({answer["digest"] for answer in answers}) == 1
    before = np.concatenate([answer["before"] for answer in answers])
    assert (before[0] != before[1]).any()
    for answer in answers:
        assert answer["batches"] == [0, 1, 0, 1]
        # A step that lacks rows changes nothing.
        assert {*answer["drawn"]} == {4}
        assert answer["unchanged"]
        for after in answer["after"]:
            np.testing.assert_allclose(after, before.mean(0), rtol=1e-6)
    if len(answers) == 2:
        assert output.count("Received: no rows on workers [1]") == 1
    digests = [path.read_text() for path in tmp_path.rglob(backups.DIGEST)]
    # Two epochs of each worker; the weights move between them.
    assert (len(digests), len({*digests})) == (2 * len(answers), 2)
    assert reshard(folder, 3, tmp_path / "new") == backups.Point(2, 0)


def test_values_that_callbacks_set_by_worker_become_those_of_worker_0(pools):
    (first, second), output = pools(2).run(loop_cases.case_own_score)
    assert first == second
    begins, rates = first["weights"], [rate for _, rate in first["rates"]]
    # Worker 0's best epoch was the first, whose weights the second epoch began with.
    assert begins[-1] == begins[1] and begins[1] != begins[2]
    assert rates == [pytest.approx(0.01)] * 4
    for name in ("sequential/first/kernel", "sgd/learning_rate"):
        assert f"Received: different variables=['{name}'" in output


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("cluster", "way"),
    [((2,), "steps"), ((2, "mirrored"), "loops")],
    ids=["two", "mirrored"],
)
def test_batches_with_fewer_rows_than_replicas_are_refused(pools, cluster, way):
    for message in pools(*cluster).run(loop_cases.case_short_batches, way).answers:
        assert "Received: rows for 1 of 2 replicas" in message


def test_loops_that_keep_no_step_are_refused(pools):
    for errors in pools(2).run(loop_cases.case_foreign_loops).answers:
        for error in errors:
            assert "This loop of Keras does not keep step with the other" in error


def test_only_floating_statistics_are_averaged(pools):
    answers, _ = pools(2).run(loop_cases.case_statistics)
    for rank, answer in enumerate(answers):
        assert answer["level"] == [1.5, 7.0]
        assert answer["count"] == rank + 1
        assert answer["seeds"] == [rank, rank]
