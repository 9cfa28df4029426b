"""The example, run as a user runs it, for a few steps on one worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import compare_methods  # noqa: E402
import fashion_mnist  # noqa: E402


def run_example(*arguments, workers=1):
    """Runs the example through the launcher; its own lines, without the rank."""
    ours = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    path = (str(ROOT), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    launch = [sys.executable, "-m", "tfgradcomp.launch", "--workers", str(workers)]
    launch += ["--network", "host"]
    return subprocess.run(
        [*launch, "examples/fashion_mnist.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


def lines_of(text):
    return [line.partition("] ")[2] for line in text.splitlines()]


def noise_of(run):
    """Returns the lines on stderr but that on the first preparation of the data."""
    return [line for line in run.stderr.splitlines() if "data: prep" not in line]


@pytest.mark.slow  # The same script on two workers is below.
def test_one_worker_trains_and_reports():
    few = ("--method", "none", "--epochs", "2", "--steps-per-epoch", "3")
    run = run_example(*few)
    assert run.returncode == 0, run.stderr
    assert noise_of(run) == []
    lines = lines_of(run.stdout)
    if lines[0].startswith("notice: "):
        del lines[0]
    assert lines[0] == (
        "none: 1 x 64 examples a step, learning rate 0.05, seed 0, 80202 parameters"
    )
    assert [line for line in lines if line.startswith("Epoch")] == [
        "Epoch 1/2",
        "Epoch 2/2",
    ]
    accuracy, traffic, weights = lines[-3:]
    assert 0.0 < float(re.fullmatch(r"test accuracy: (\d\.\d{4})", accuracy)[1]) < 1.0
    assert traffic == "bytes per step and worker: 0 sent, 0 received"
    pattern = r"worker 0 of 1: weights sha256 [0-9a-f]{16}, data \S+"
    assert re.fullmatch(pattern, weights)


# `make quickstart` is the same on larger data.
@pytest.mark.slow
def test_two_workers_train_with_three_levels():
    run = run_example("--epochs", "1", "--steps-per-epoch", "20", workers=2)
    assert run.returncode == 0, run.stderr
    assert noise_of(run) == []
    values = compare_methods.parse(run.stdout, workers=2)
    # One gather: 1.6 bits of 79,744 elements, 458 others as float32, both with a flag.
    assert float(values["ratio"]) > 17
    assert float(values["accuracy"]) > 0.15


def test_unknown_method_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", "--method", "zip"])
    with pytest.raises(SystemExit):
        fashion_mnist.parse_arguments()
    assert "invalid choice: 'zip'" in capsys.readouterr().err


OUTPUT = """[0] none: 2 x 64 examples a step, learning rate 3e-04, seed 0, 9 parameters
[0] test accuracy: 0.8812
[0] bytes per step and worker: 320 sent, 321 received
[0] compression ratio: 1.50 (...)
[0] worker 0 of 2: weights sha256 00ff, data digits
[1] worker 1 of 2: weights sha256 00ff, data digits
"""


def test_comparison_reads_what_a_run_prints():
    assert compare_methods.parse(OUTPUT, workers=2) == {
        "learning_rate": "3e-04",
        "accuracy": "0.8812",
        "sent": "320",
        "received": "321",
        "ratio": "1.50",
        "data": "digits",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1 of 2: weights sha256 00ff", "1 of 2: weights sha256 00fe", "equal weights"),
        ("[1] worker 1 of 2: weights", "", "equal weights"),
        ("test accuracy", "accuracy", "printed no accuracy"),
    ],
)
def test_comparison_refuses_what_it_cannot_vouch_for(old, new, message):
    with pytest.raises(ValueError, match=message):
        compare_methods.parse(OUTPUT.replace(old, new), workers=2)


def test_table_goes_between_the_markers_only():
    text = compare_methods.README.read_text()
    changed = compare_methods.replace_table(text, "a table")
    begin, end = "<!-- results: begin -->", "<!-- results: end -->"
    before, _, after = text.partition(begin)
    assert changed.startswith(before)
    assert changed.endswith(after.partition(end)[2])
    again = compare_methods.replace_table(changed, "another")
    assert "a table" not in again
    assert f"{begin}\nanother\n{end}" in again
    with pytest.raises(ValueError, match="should hold"):
        compare_methods.replace_table("no markers", "a table")


def test_comparison_covers_the_methods_of_the_example():
    assert {*fashion_mnist.METHODS} == {*compare_methods.METHODS}
