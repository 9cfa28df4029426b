"""Virtual workers: one process with the bits of several."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tfgradcomp
from tests.fit import fit_cases, virtual_cases

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    """Runs a program with this copy of the package; returns its output."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # Twelve devices take a process of their own.
def test_ranks_are_in_numerical_order_and_devices_are_made_once(pools):
    # By name, CPU:10 comes before CPU:2.
    ((gathered, sent, rows, again, error),), output = pools(12, "virtual").run(
        virtual_cases.ranks
    )
    assert gathered == [[[rank] for rank in range(12)]] * 12
    assert sent == [[[100 * i + rank] for i in range(12)] for rank in range(12)]
    assert rows == [[2 * rank, 2 * rank + 1] for rank in range(12)]
    assert again == 12
    assert "Call virtual_workers once, at the program's start" in error
    assert error.endswith("Received: num_workers=13, devices=12")
    assert "studies, not for speed" in output


@pytest.mark.parametrize("count", [0, 2.0, True])
def test_invalid_numbers_of_workers_raise(count):
    with pytest.raises(ValueError, match="num_workers must be an integer, at least 1"):
        tfgradcomp.virtual_workers(count)


def test_a_worker_of_a_cluster_has_no_virtual_workers(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"task": {"index": 1}}')
    with pytest.raises(ValueError, match="Received: TF_CONFIG is set, num_workers=2"):
        tfgradcomp.virtual_workers(2)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", virtual_cases.CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_one_process_has_the_bits_of_several(pools, workers, name):
    def train(kind):
        pool = pools(workers, kind)
        return pool.run(virtual_cases.train, name, timeout=600).answers

    real = train("multi_worker")
    ((values, *logs),) = train("virtual")
    for rank, (own, *own_logs) in enumerate(real):
        assert [own_value for (own_value,) in own] == [
            value[min(rank, len(value) - 1)] for value in values
        ]
        assert own_logs == logs
    if "residuals" in name:
        # Each worker has another residual.
        assert any(len({*value}) == workers for value in values)


@pytest.mark.slow
def test_replicas_of_a_process_exchange_two_tables(pools):
    # Each table's message is checked; a check of one replica that waits for another's
    # waits for ever.
    answers = [
        *pools(2).run(virtual_cases.two_tables).answers,
        *pools(2, "mirrored").run(virtual_cases.two_tables).answers,
    ]
    assert len(answers) == 3
    assert len({*answers}) == 1


@pytest.mark.slow
def test_a_worker_whose_share_is_empty_evaluates_and_predicts(pools):
    (answer,) = pools(2, "virtual").run(fit_cases.case_empty_share).answers
    for got, want in answer.values():
        np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_64_workers_train_a_lenet():
    output = run(
        *("examples/fashion_mnist.py", "--virtual", "64", "--epochs", "1"),
        *("--steps-per-epoch", "20", "--batch-size", "16"),
    )
    assert "64 x 16 examples a step" in output
    assert "test accuracy: 0." in output


@pytest.mark.slow
def test_the_example_of_the_document_runs(tmp_path):
    text = (ROOT / "docs/virtual-workers.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "study.py").write_text(code)
    assert "worker 2: norm of the residual" in run(str(tmp_path / "study.py"))
