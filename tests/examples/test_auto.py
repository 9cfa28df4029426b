"""The study of Auto's classes: its plan, its tables, and a choice that is given."""

import math
import sys
from pathlib import Path

import keras
import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/studies")]
import auto  # noqa: E402
import compare_methods  # noqa: E402
import study  # noqa: E402


def row(way, seed, accuracy, method="", error=math.nan):
    """A row of LeNet."""
    key = {"task": "LeNet", "way": way, "seed": seed}
    return key | {"accuracy": accuracy, "method": method or way, "error": error}


def test_a_method_that_a_class_has_chosen_is_not_trained_again():
    rows = [row("medium", 0, 80.0, "TernGrad")]
    keys = auto.keys_of_methods([0, 1], rows)
    own = [key["seed"] for key in keys if (*key.values(),)[:2] == ("LeNet", "TernGrad")]
    assert own == [1]
    # Error feedback does not go in front of Adam.
    adam = {key["way"] for key in keys if key["task"] == "transformer"}
    assert "PowerSGD(rank=4)" not in adam and auto.MOVED in adam


def test_ways_make_optimizers():
    for way in ("float32", "low", "TernGrad", "bfloat16"):
        made = auto.make_optimizer(way, keras.optimizers.SGD(0.1, 0.9), 5)
        assert made.built is False


def test_tables_compare_seed_by_seed_and_say_whether_a_class_holds():
    rows = [row("float32", 0, 80.0), row("float32", 1, 81.0)]
    rows += [row("medium", 1, 80.0, "TernGrad", 0.4)]
    rows += [row("medium", 0, 79.8, "ORQ(levels=5, reply='requantize')", 0.7)]
    rows += [row("TernGrad", 0, 79.9, error=0.5), row("bfloat16", 1, 80.5)]
    (line,) = auto.table(rows, of_classes=True).splitlines()[2:]
    assert line.startswith("| LeNet | medium | `ORQ(levels=5, reply=")
    # -0.2 and -1: 12.71 deviations of 0.566, over the root of 2.
    assert line.endswith("| 79.90 | -0.60 ± 5.08 | -0.20, -1.00 | -0.50 | yes |")
    lines = auto.table(rows, of_classes=False).splitlines()[2:]
    assert lines[0] == "| LeNet | none | `float32` |  | 80.50 |  |  | +0.50 |  |"
    # The row of the class is one of the method as well.
    (line,) = (one for one in lines if "TernGrad" in one)
    assert line.startswith("| LeNet | medium | `TernGrad` | 0.50, 0.40 | 79.95 |")
    assert line.endswith("| -0.55 ± 5.72 | -0.10, -1.00 | -0.50 | yes |")
    assert auto.verdict("low", [-0.2, -0.5]) == "no"


def test_the_page_has_places_for_the_tables():
    text = (ROOT / "docs" / auto.PAGE).read_text()
    for name in ("classes", "methods"):
        changed = compare_methods.replace_table(text, "a table", name)
        assert f"<!-- {name}: begin -->\na table\n" in changed


def test_texts_of_a_file_are_read_as_texts(tmp_path, monkeypatch):
    (tmp_path / "examples/results").mkdir(parents=True)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    keys = [{"way": "low"}]
    measured = {"error": 0.5, "method": "TernGrad"}
    for measure in (lambda key: measured, None):
        (found,) = study.complete("x", keys, measure, ["error"], words=["method"])
        where = {name: found[name] for name in study.WHERE}
        assert found == keys[0] | measured | where
