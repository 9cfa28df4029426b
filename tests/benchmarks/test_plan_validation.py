"""The arithmetic of the comparison of plans with a virtual cluster."""

import csv

import pytest

from tests.benchmarks.scripts import import_script, run
from tfgradcomp.transports import LinearCost

validation = import_script("plan_validation")


def test_the_slowest_workers_median_makes_the_line():
    answers = [
        {"tcp": {"sum": [[10, [1.0, 3.0, 2.0]], [30, [5.0, 4.0, 9.0]]]}},
        {"tcp": {"sum": [[10, [2.0, 2.0, 2.0]], [30, [6.0, 6.0, 6.0]]]}},
    ]
    # Medians of (2, 3, 2) and of (6, 6, 9).
    assert validation.lines_of("tcp", answers) == {"sum": LinearCost(2.0, (6 - 2) / 20)}


@pytest.mark.slow
def test_a_small_comparison_runs(tmp_path, permitted):
    small = ("--workload", "lenet", "--workers", 2, "--rates", "50mbit")
    few = ("--rounds", 2, "--output", tmp_path)
    code, output, errors = run("plan_validation.py", *small, *few)
    assert code == 0, errors
    with open(tmp_path / "plan_validation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [case.name for case in validation.CASES]
    for row in rows:
        error = float(row["predicted_ms"]) / float(row["measured_ms"]) - 1
        assert float(row["error"]) == pytest.approx(error)
    assert "| lenet | 2 | 50mbit | float32 |" in output
