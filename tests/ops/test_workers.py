"""Real workers whose machines differ, or have little to offer."""

from pathlib import Path

import pytest

from tests.cluster import run_workers
from tests.ops.worker_cases import instruction_sets, train_with

METHODS = ["TernGrad", "DistEFBlockSGDM", "DistEFSGD, ORQ-9", "VarianceBased, gaps"]
METHODS += ["SignSGD, random ties", "QSGD", "NaturalCompression", "Hybrid, gaps"]


def check(answers):
    for _, before, after in answers:
        assert before == answers[0][1]
        assert after == answers[0][2] != before


@pytest.mark.parametrize("name", METHODS[1:2])
def test_native_and_pure_tensorflow_train_together(pools, name):
    answers = pools(2).run(train_with, ["python", "best"], name, 30).answers
    assert answers[0][0] == "python" != answers[1][0]
    check(answers)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", METHODS)
def test_a_thousand_steps_on_machines_that_differ(pools, name):
    machines = ["python", *instruction_sets()[-2:]]
    trained = pools(len(machines)).run(train_with, machines, name, 1000, timeout=800)
    answers = trained.answers
    assert [answer[0] for answer in answers] == machines
    check(answers)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_more_buckets_than_threads(tmp_path, monkeypatch):
    for name in ("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"):
        monkeypatch.setenv(name, "1")
    script = Path(__file__).with_name("bucket_worker.py")
    transports = ("all_gather", "all_reduce", "sharded")
    answers, _ = run_workers(script, 2, tmp_path, "70", *transports, timeout=1400)
    for transport, *both in zip(transports, *answers, strict=True):
        assert [answer[0] for answer in both] == [70, 70], transport
        check(both)
