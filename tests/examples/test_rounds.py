"""The study of local steps, Adam with one bit, and float steps: its plan and tables."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/studies")]
import compare_methods  # noqa: E402
import rounds  # noqa: E402
import study  # noqa: E402


@pytest.mark.parametrize("name", rounds.PARTS)
def test_ways_make_optimizers_and_their_page_has_a_place(name):
    keys = rounds.keys_of(name, [0, 1])
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    for group in rounds.PARTS[name].groups.values():
        for way in group.ways.values():
            assert way(1e-3, 100).built is False
    text = (ROOT / "docs" / rounds.PARTS[name].page).read_text()
    changed = compare_methods.replace_table(text, "a table", "accuracy")
    assert "<!-- accuracy: begin -->\na table\n" in changed


def test_local_steps_are_as_many_as_the_row_says():
    ways = rounds.PARTS["local_steps"].groups["LeNet"].ways
    for way, make in [*ways.items()][1:]:
        optimizer = make(1e-3, 100)
        assert optimizer.every == int(way.split()[0])
        outer = optimizer.outer
        assert ("1 bit" in way) == type(outer).__name__.startswith("DistEFBlockSGD")
        momentum = getattr(outer, "momentum", 0) or outer.inner_optimizer.momentum
        assert momentum == (0.9 if "momentum" in way else 0)


def row(way, seed, accuracy, part=1.0):
    """A row of Strom's group."""
    key = {"part": "uncompressed_steps", "group": "Strom", "way": way, "seed": seed}
    return key | {"accuracy": accuracy, "bytes": part}


def test_table_compares_seed_by_seed():
    rows = [row("alone", 0, 80.0), row("alone", 1, 81.0)]
    rows += [
        row("dense_every=10", 1, 79.0, 0.104),
        row("dense_every=10", 0, 80.0, 0.104),
    ]
    lines = rounds.Rows("uncompressed_steps", rows).table().splitlines()
    assert lines[2] == "| Strom | alone | 80.50 |  |  |  |"
    # 0 and -2: 12.71 deviations of 1.41, over the root of 2.
    expected = (
        "| Strom | dense_every=10 | 79.50 | -1.00 ± 12.71 | +0.00, -2.00 | 10 % |"
    )
    assert lines[3] == expected


def test_the_figure_has_a_point_for_each_way(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(study, "ROOT", tmp_path)
    rows = [
        key | {"accuracy": 80.0 + key["seed"], "bytes": 1.0}
        for key in rounds.keys_of("local_steps", [0, 1])
    ]
    rounds.Rows("local_steps", rows).draw()
    assert (tmp_path / "docs/local-steps.png").read_bytes().startswith(b"\x89PNG")
