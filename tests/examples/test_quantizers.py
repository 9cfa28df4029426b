"""The ladder of quantizers: its plan, its schedule, its tables, and a run of it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import accuracy_ladder  # noqa: E402
import compare_methods  # noqa: E402
import models  # noqa: E402
from accuracy_ladder import Result, Run  # noqa: E402


def run_ladder(*arguments):
    """Runs the script; its processes end with it."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    path = (str(ROOT), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    process = subprocess.Popen(
        [sys.executable, "examples/accuracy_ladder.py", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=250)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return process.returncode, output, errors


@pytest.mark.slow
def test_two_seeds_train_and_report():
    before = compare_methods.README.read_text()
    code, output, errors = run_ladder(
        *("--quick", "--studies", "ladder"),
        *("--methods", "FP", "ORQ-3", "--seeds", "0", "5"),
    )
    assert code == 0, errors
    assert compare_methods.README.read_text() == before
    ladder = output.split("\nladder\n")[1]
    assert "256 images; 1 epochs; seeds 0, 5:" in ladder
    rows = [line.split(" | ") for line in ladder.splitlines() if "FP |" in line[:8]]
    assert [row[1] for row in rows] == ["32.00"]
    # 20 codes of base 3 in 32 bits, three levels of 32 bits for 2048 elements, and
    # words and buckets that are not full.
    bits = float(re.search(r"\| ORQ-3 \| ([\d.]+) \|", ladder)[1])
    assert bits == pytest.approx(32 / 20 + 3 * 32 / 2048, abs=0.01)
    # Each process says what it found.
    assert len(re.findall(r"^seed 0: Run", output, re.MULTILINE)) == 2
    assert len(re.findall(r"^seed 5: Run", output, re.MULTILINE)) == 2


def test_rate_warms_up_from_a_tenth_and_falls_to_zero():
    def rates(run):
        optimizer = accuracy_ladder.make_optimizer(run, 100, 0)
        schedule = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        return [float(schedule(step)) for step in range(101)]

    warm = rates(Run("ORQ-3", warms_up=True, learning_rate=0.5))
    assert warm[0] == pytest.approx(0.05)
    assert warm[5] == pytest.approx((0.05 + 0.5) / 2)
    assert warm[10] == pytest.approx(0.5)
    assert warm[55] == pytest.approx(0.25)
    assert warm[100] == pytest.approx(0, abs=1e-6)
    cold = rates(Run("FP", learning_rate=0.5))
    assert cold[0] == pytest.approx(0.5)
    assert cold[50] == pytest.approx(0.25)


def test_optimizers_are_what_the_rows_say():
    run = Run("ORQ-5", block_size=512, clip_factor=1.7)
    optimizer = accuracy_ladder.make_optimizer(run, 10, seed=7)
    assert type(optimizer).__name__ == "ORQ"
    assert (optimizer.levels, optimizer.block_size) == (5, 512)
    assert (optimizer.clip_factor, optimizer.seed) == (1.7, 7)
    assert (optimizer.transport, optimizer.min_size) == ("all_gather", 0)
    assert optimizer.inner_optimizer.momentum == 0.9
    for method in accuracy_ladder.METHODS:
        accuracy_ladder.make_optimizer(Run(method), 10, 0)


def test_resnet_8():
    model = models.make_resnet()
    # A stem and two convolutions for each of three blocks, and two projections.
    kernels = [tuple(v.shape) for v in model.trainable_variables if len(v.shape) == 4]
    expected = [(3, 3, 1, 16), (3, 3, 16, 16), (3, 3, 16, 16)]
    expected += [(1, 1, 16, 32), (3, 3, 16, 32), (3, 3, 32, 32)]
    expected += [(1, 1, 32, 64), (3, 3, 32, 64), (3, 3, 64, 64)]
    assert sorted(kernels) == sorted(expected)
    assert model.output_shape == (None, 10)


def found(*accuracies):
    return [Result(accuracy, 3.2) for accuracy in accuracies]


def test_tables():
    ladder = accuracy_ladder.ladder_table(
        {Run("FP"): found(80, 81, 82), Run("ORQ-9"): found(79, 82, 79)}
    )
    assert ladder[2:] == [
        "| FP | 3.20 | 81.00 (80.00 to 82.00) |  | +0.00 |",
        # -1, 1 and -3: 4.30 deviations of 2, over the root of 3.
        "| ORQ-9 | 3.20 | 80.00 (79.00 to 82.00) | -1.00 ± 4.97 | -0.29 |",
    ]
    sizes = accuracy_ladder.BUCKET_SIZES
    buckets = accuracy_ladder.buckets_table(
        {Run("ORQ-3", size): found(70 + i) for i, size in enumerate(sizes)}
    )
    assert len(buckets) == 4
    assert buckets[2].startswith("| ORQ-3 | 70.00 (70.00 to 70.00) | 71.00 ")
    assert buckets[3] == "| paper's | 91.66 | 90.92 | 90.18 | 88.86 | 87.08 |"
    factors = accuracy_ladder.CLIP_FACTORS
    runs = [Run("ORQ-3", clip_factor=c, warms_up=True) for c in factors]
    clipping = accuracy_ladder.clipping_table(
        {Run("FP", warms_up=True): found(80)}
        | {run: found(70 + i) for i, run in enumerate(runs)}
    )
    assert clipping[0] == "| method | not clipped | c = 1.7 | c = 2.5 |"
    assert clipping[-2] == "| less FP | -10.00 | -9.00 | -8.00 |"
    assert clipping[-1] == "| paper, less FP | | -0.35 | -1.14 |"
    rates = accuracy_ladder.rates_table({Run("FP", learning_rate=0.05): found(80)})
    assert rates[0] == "| learning rate | 0.05 |"
    assert rates[2] == "| FP | 80.00 (80.00 to 80.00) |"


def test_the_readme_has_a_place_for_each_study():
    text = compare_methods.README.read_text()
    assert set(accuracy_ladder.TABLES) == set(accuracy_ladder.STUDIES)
    for study in accuracy_ladder.STUDIES:
        changed = compare_methods.replace_table(text, "a table", study)
        assert f"<!-- {study}: begin -->\na table\n<!-- {study}: end -->" in changed
