"""The study of quantizers: its plan, its schedule, its tables, and a run of it."""

import sys
from pathlib import Path

import pytest

from tests.examples.measured import square

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/studies")]
import compare_methods  # noqa: E402
import models  # noqa: E402
import quantizers  # noqa: E402
import study  # noqa: E402
from quantizers import Part, Results, Run  # noqa: E402


@pytest.mark.slow
def test_bits_are_those_of_the_words():
    part = Part([Run("FP"), Run("ORQ-3")], images=256, epochs=1)
    plain, three = (quantizers.train(key) for key in quantizers.keys_of(part, [5]))
    assert plain["bits"] == 32
    # 20 codes of base 3 in 32 bits, three levels of 32 bits for 2048 elements, and
    # words and blocks that are not full.
    assert three["bits"] == pytest.approx(32 / 20 + 3 * 32 / 2048, abs=0.01)
    assert 0 < three["accuracy"] < 100


def test_rate_warms_up_from_a_tenth_and_falls_to_zero():
    def rates(run):
        optimizer = quantizers.make_optimizer(run, 100, 0)
        schedule = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        return [float(schedule(step)) for step in range(101)]

    warm = rates(Run("ORQ-3", warms_up=True, rate=0.5))
    assert warm[0] == pytest.approx(0.05)
    assert warm[5] == pytest.approx((0.05 + 0.5) / 2)
    assert warm[10] == pytest.approx(0.5)
    assert warm[55] == pytest.approx(0.25)
    assert warm[100] == pytest.approx(0, abs=1e-6)
    cold = rates(Run("FP", rate=0.5))
    assert cold[0] == pytest.approx(0.5)
    assert cold[50] == pytest.approx(0.25)


def test_optimizers_are_what_the_rows_say():
    run = Run("ORQ-5", block_size=512, clip_factor=1.7)
    optimizer = quantizers.make_optimizer(run, 10, seed=7)
    assert type(optimizer).__name__ == "ORQ"
    assert (optimizer.levels, optimizer.block_size) == (5, 512)
    assert (optimizer.clip_factor, optimizer.seed) == (1.7, 7)
    assert (optimizer.transport, optimizer.min_size) == ("all_gather", 0)
    assert optimizer.inner_optimizer.momentum == 0.9
    for method in quantizers.METHODS:
        quantizers.make_optimizer(Run(method), 10, 0)


def test_resnet_8():
    model = models.make_resnet()
    # A stem and two convolutions for each of three blocks, and two projections.
    kernels = [tuple(v.shape) for v in model.trainable_variables if len(v.shape) == 4]
    expected = [(3, 3, 1, 16), (3, 3, 16, 16), (3, 3, 16, 16)]
    expected += [(1, 1, 16, 32), (3, 3, 16, 32), (3, 3, 32, 32)]
    expected += [(1, 1, 32, 64), (3, 3, 32, 64), (3, 3, 64, 64)]
    assert sorted(kernels) == sorted(expected)
    assert model.output_shape == (None, 10)


def results(found):
    """Results of runs with so many accuracies, those of seeds 0, 1, ..."""
    return Results(
        [
            run._asdict() | {"seed": seed, "accuracy": accuracy, "bits": 3.2}
            for run, accuracies in found.items()
            for seed, accuracy in enumerate(accuracies)
        ]
    )


def test_tables_of_methods():
    five, other = Run("ORQ-5"), Run("QSGD-5")
    found = results(
        {
            Run("FP"): (80, 81, 82),
            Run("ORQ-9"): (79, 82, 79),
            five: (78, 79),
            other: (77.5, 77.5),
        }
    )
    ladder = quantizers.ladder_table(found).splitlines()
    assert ladder[2:4] == [
        "| FP | 3.20 | 81.00 (80.00 to 82.00) |  |  |",
        # -1, 1 and -3: 4.30 deviations of 2, over the root of 3.
        "| ORQ-9 | 3.20 | 80.00 (79.00 to 82.00) | -1.00 ± 4.97 | -0.29 |",
    ]
    (line,) = quantizers.pairs_table(found, "ladder").splitlines()[2:]
    # 0.5 and 1.5: 12.71 deviations of 0.71, over the root of 2.
    assert line.startswith("| ORQ-5, less QSGD-5 | +1.00 ± 6.3")
    assert line.endswith(" | +0.92 |")


def test_tables_of_blocks_clipping_and_rates():
    sizes = quantizers.BLOCK_SIZES
    found = {Run("ORQ-3", size): (70 + i,) for i, size in enumerate(sizes)}
    blocks = quantizers.blocks_table(results(found)).splitlines()
    assert len(blocks) == 4
    assert blocks[2].startswith("| ORQ-3 | 70.00 (70.00 to 70.00) | 71.00 ")
    assert blocks[3] == "| paper's | 91.66 | 90.92 | 90.18 | 88.86 | 87.08 |"
    runs = [Run("ORQ-3", clip_factor=c, warms_up=True) for c in quantizers.CLIP_FACTORS]
    found = {run: (70 + i,) for i, run in enumerate(runs)}
    found[Run("FP", warms_up=True)] = (80,)
    clipping = quantizers.clipping_table(results(found)).splitlines()
    assert clipping[0] == "| method | not clipped | c = 1.7 | c = 2.5 |"
    assert clipping[-2] == "| less FP | -10.00 | -9.00 | -8.00 |"
    assert clipping[-1] == "| paper, less FP |  | -0.35 | -1.14 |"
    rates = quantizers.rates_table(results({Run("FP", rate=0.05): (80,)})).splitlines()
    assert rates[0] == "| learning rate | 0.05 |"
    assert rates[2] == "| FP | 80.00 (80.00 to 80.00) |"


def test_the_figure_shows_both_parts(tmp_path, monkeypatch):
    (tmp_path / "docs/studies").mkdir(parents=True)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    of_parts = {
        name: results({run: (80, 81) for run in quantizers.PARTS[name].runs})
        for name in ("ladder", "workers")
    }
    quantizers.draw(of_parts)
    drawn = (tmp_path / "docs/studies/quantizers.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")


def test_the_page_has_a_place_for_each_table():
    text = (ROOT / "docs/studies/quantizers.md").read_text()
    assert set(quantizers.TABLES) == set(quantizers.PARTS)
    for name in (*quantizers.PARTS, "ladder pairs", "workers pairs"):
        changed = compare_methods.replace_table(text, "a table", name)
        assert f"<!-- {name}: begin -->\na table\n<!-- {name}: end -->" in changed


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_are_kept_as_they_come(processes, tmp_path, monkeypatch):
    (tmp_path / "examples/results").mkdir(parents=True)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "git", lambda *_: "abc")
    monkeypatch.setattr(study, "processor", lambda: "one")
    first = [{"number": 3, "none": None}]
    study.complete("squares", first, square, ["square"])
    keys = [{"number": number, "none": None} for number in (1, 2, 3, 2)]
    rows = study.complete("squares", keys, square, ["square"], processes)
    assert [row["square"] for row in rows] == [1, 4, 9, 4]
    # All are known: nothing is measured any more.
    assert study.complete("squares", keys, None, ["square"]) == rows
    lines = (tmp_path / "examples/results/squares.csv").read_text().split()
    assert lines[0] == "number,none,square,commit,processor"
    assert lines[1] == "3,None,9.0,abc,one"
    assert len(lines) == 4


def test_a_page_names_the_processors_of_its_rows(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/page.md"
    page.write_text("<!-- accuracy: begin -->\n<!-- accuracy: end -->\n")
    monkeypatch.setattr(study, "ROOT", tmp_path)
    rows = [{"processor": name} for name in ("fast", "slow", "fast")]
    study.write_page("page.md", "a table", "two workers", rows=rows)
    assert "two workers on one machine, CPU fast and slow, " in page.read_text()
