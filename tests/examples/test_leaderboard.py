"""The leaderboard: its rows, and each method next to float32 in the quick form."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")
pytest.importorskip("sklearn", reason="needs tfgradcomp[examples]")

import tfgradcomp  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import leaderboard  # noqa: E402
import ways  # noqa: E402


def test_every_wrapper_has_a_row():
    rows = {name.partition(",")[0] for name, way in ways.WAYS.items() if way.planned}
    assert rows == set(tfgradcomp.optimizers.__all__)


# Trajectories of every method are NumPy's in `tests/optimizers`, and the next test
# trains two rows. The factors of the others are for the tables of a release.
@pytest.mark.slow
def test_every_method_learns_nearly_as_float32_does():
    rows = leaderboard.quick()
    accuracies = {row["way"]: row["accuracy"] for row in rows}
    for name, way in ways.WAYS.items():
        assert accuracies[way.baseline] > 0.9, name
    assert leaderboard.behind(rows) == []


def test_a_wrong_rate_is_noticed(monkeypatch):
    few = {"momentum": ways.WAYS["momentum"]}
    few["TernGrad"] = ways.WAYS["TernGrad"]._replace(factor=0.01)
    monkeypatch.setattr(leaderboard, "WAYS", few)
    (line,) = leaderboard.behind(leaderboard.quick())
    assert line.startswith("digits, TernGrad: -")


def row(way, seed, accuracy):
    found = {"model": "CNN", "way": way, "seed": seed, "accuracy": accuracy}
    return found | {"bytes": 1e4}


def test_points_are_those_of_the_same_seed_and_inner_optimizer():
    rows = [
        *(row("momentum", 0, 0.9), row("momentum", 1, 0.8), row("SGD", 0, 0.5)),
        *(row("TernGrad", 0, 0.89), row("TernGrad", 1, 0.8), row("Strom", 0, 0.44)),
    ]
    less = leaderboard.less_float32(rows)
    assert less["CNN", "TernGrad"] == pytest.approx([-1.0, 0.0])
    assert less["CNN", "Strom"] == pytest.approx([-6.0])
    assert leaderboard.behind(rows) == ["CNN, Strom: -6.0 points, next to float32"]
    lines = leaderboard.table(rows).splitlines()
    assert lines[0] == "### CNN"
    assert lines[4].startswith("| float32 | SGD, momentum | 85.00 |")
    assert "| `TernGrad` | SGD, momentum | 84.50 | -0.50 ± " in lines[6]
    assert lines[7].startswith("| `Strom` | SGD | 44.00 | -6.00 | 10,000 | ")
    at_100mbit, at_1gbit = map(float, lines[7].strip("| ").split(" | ")[-2:])
    assert at_100mbit > at_1gbit > 1000 * leaderboard.COMPUTE_SECONDS
