"""The comparison of choices with the best methods."""

import csv

import pytest

from tests.benchmarks.scripts import import_script, run

choices = import_script("choices")
POINT = {"model": "lenet", "rate": "1gbit", "workers": 2}


def test_choices_are_compared_with_the_best_of_their_class():
    times = {
        choices.STOCK: ("none", [4.0, 9.0, 2.0]),
        "float32": ("none", [5.0, 5.0, 5.0]),
        "HalfPrecision": ("none", [3.0, 3.0, 3.0]),
        "TernGrad": ("medium", [1.0, 2.0, 3.0]),
    }
    answer = {
        "compute": 0.5,
        "predicted": {"float32": 4.5, "HalfPrecision": 3.5, "TernGrad": None},
        "methods": {
            name: {"risk": risk, "transports": ["B", "A", "B"], "seconds": seconds}
            for name, (risk, seconds) in times.items()
        },
    }
    steps = choices.steps_of(POINT, answer, compute_ms=1000.0)
    assert [row["measured_ms"] for row in steps] == [5000, 6000, 4000, 3000]
    assert [row["predicted_ms"] for row in steps] == [None, 4500, 3500, None]
    assert steps[0]["transports"] == "A B"
    chosen = {"none": "float32", "low": "HalfPrecision", "medium": "HalfPrecision"}
    rows = choices.choices_of(steps, chosen)
    assert [row["best"] for row in rows] == ["HalfPrecision"] * 2 + ["TernGrad"]
    assert [row["of_best"] for row in rows] == [1.5, 1.0, pytest.approx(4 / 3)]
    assert [row["of_float32"] for row in rows] == [1.2, 0.8, 0.8]
    sentence = choices.counts(rows)
    assert sentence.startswith("1 of 3 choices are within 10 % of the best")
    assert "; 1 are more than 10 % behind" in sentence
    # Risks whose choice and best method are the same would share a line.
    assert len(choices.table(rows)) == 2 + 3
    assert len(choices.table([*rows, {**rows[-1], "risk": "high"}])) == 2 + 3


@pytest.mark.slow
def test_a_small_comparison_runs(tmp_path, permitted):
    code, output, errors = run("choices.py", "--quick", "--output", tmp_path)
    assert code == 0, errors
    with open(tmp_path / "choices.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["risk"] for row in rows] == ["none", "low", "medium", "high"]
    with open(tmp_path / "choices_steps.csv", newline="") as file:
        steps = {row["method"]: row for row in csv.DictReader(file)}
    for row in rows:
        assert row["choice_ms"] == steps[row["choice"]]["measured_ms"]
        assert float(row["of_best"]) >= 1
    assert "| lenet | 100mbit | 2 | none |" in output
