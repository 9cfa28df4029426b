"""The example of the sparse methods: a run of it, its optimizers, rows and tables."""

import csv
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import compare_methods  # noqa: E402
import models  # noqa: E402
import variance_based  # noqa: E402
from variance_based import Result, Settings  # noqa: E402

from tfgradcomp.transports.traffic import Traffic  # noqa: E402

SETTINGS = Settings(256, 1, 0, 2, "digits", "00ff")


def run_example(*arguments):
    """Runs the example on two workers; they end with the launcher."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_CONFIG", None)
    path = (str(ROOT), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    launch = [sys.executable, "-m", "tfgradcomp.launch", "--workers", "2"]
    process = subprocess.Popen(
        [*launch, "examples/variance_based.py", *arguments],
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
        # The launcher ends its workers.
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    return process.returncode, output, errors


@pytest.mark.slow  # That of README.md is run quickly.
def test_two_workers_train_and_keep_their_rows(tmp_path):
    before = compare_methods.README.read_text()
    few = ("--images", "256", "--epochs", "1", "--optimizers", "adam")
    code, output, errors = run_example(
        *few, "--methods", "none", "strom-0.1", "--output", str(tmp_path)
    )
    assert code == 0, errors
    assert compare_methods.README.read_text() == before
    with open(tmp_path / "variance_based.csv", newline="") as file:
        none, strom = csv.DictReader(file)
    assert (none["optimizer"], none["method"]) == ("adam", "none")
    assert (strom["optimizer"], strom["method"]) == ("adam", "strom-0.1")
    assert (none["images"], none["epochs"], none["workers"]) == ("256", "1", "2")
    assert (none["ratio"], none["bytes_ratio"]) == ("1", "1")
    # A word an element, and a few more a step.
    assert float(strom["ratio"]) > 2
    assert float(strom["bytes_ratio"]) > 2
    assert output.count("[0] adam, ") == 2
    assert "[1] adam, " not in output
    assert "[0] | Adam | test accuracy, %" in output
    assert "| strom-0.1 |" in output
    assert "Momentum SGD" not in output


def test_one_worker_is_refused(monkeypatch):
    alone = types.SimpleNamespace(num_replicas_in_sync=1)
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda: alone)
    monkeypatch.setattr(sys, "argv", ["variance_based.py"])
    with pytest.raises(SystemExit, match="Expected: two or more, as in: tfgradcomp-l"):
        variance_based.main()


def test_optimizers_are_what_the_rows_say():
    def wrapped(inner, method):
        return variance_based.make_optimizer(inner, method, steps=10, seed=7)

    adam, sgd = wrapped("adam", "none"), wrapped("sgd", "none")
    assert (type(adam).__name__, type(sgd).__name__) == ("Adam", "SGD")
    assert float(adam.learning_rate) == pytest.approx(0.001)
    assert float(sgd._learning_rate(0)) == pytest.approx(0.1)
    assert float(sgd._learning_rate(10)) == pytest.approx(0, abs=1e-7)
    assert sgd.momentum == 0.9
    for method, (wrapper, *_) in variance_based.METHODS.items():
        if wrapper is None:
            continue
        optimizer = wrapped("sgd", method)
        kind, _, parameter = method.partition("-")
        value = float(parameter)
        assert type(optimizer).__name__ == wrapper
        assert type(optimizer.inner_optimizer).__name__ == "SGD"
        assert (optimizer.transport, optimizer.min_size) == ("all_gather", 0)
        assert optimizer.seed == 7
        if kind == "variance":
            assert optimizer.alpha == value
        elif kind == "QSGD":
            # The paper's bits tell magnitudes, next to the sign.
            assert optimizer.levels == value
            bits, size = {7: (2, 128), 15: (3, 512)}[optimizer.levels]
            assert optimizer.levels == 2 * (2**bits - 1) + 1
            assert optimizer.block_size == size
        else:
            assert optimizer.threshold == value
            assert getattr(optimizer, "alpha", 2.0) == 2.0


def test_vgg():
    model = models.make_vgg()
    kernels = [tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1]
    assert kernels == [
        *((3, 3, 1, 16), (3, 3, 16, 16)),
        *((3, 3, 16, 48), (3, 3, 48, 48)),
        *((3, 3, 48, 96), (3, 3, 96, 96)),
        *((96, 96), (96, 10)),
    ]
    dropped = [getattr(layer, "rate", None) for layer in model.layers]
    assert [rate for rate in dropped if rate] == [0.3, 0.4, 0.4, 0.5, 0.5]


class Moved:
    """What an optimizer says that four workers moved."""

    traffic = Traffic(
        num_workers=4,
        elements_compressed=900,
        elements_plain=100,
        bits_per_element_up=0.0,
        bits_per_element_reply=0.0,
        words_sent=50.0,
        words_received=150.0,
        elements_sent=40.0,
    )


def test_ratios():
    assert variance_based.ratios(object()) == (1.0, 1.0)
    # A ring sends and receives 3/2 of 1000 words.
    assert variance_based.ratios(Moved()) == (25.0, 15.0)


def test_rows_come_back_for_the_same_settings_only(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    assert variance_based.read_rows(path, SETTINGS) == {}
    results = {
        ("sgd", "strom-0.1"): Result(80.25, 123.5, 100.0),
        ("adam", "none"): Result(90.0, 1.0, 1.0),
        ("adam", "hybrid-0.1"): Result(10.0, float("inf"), 9.5),
    }
    variance_based.write_rows(path, SETTINGS, results)
    assert variance_based.read_rows(path, SETTINGS) == results
    for name in Settings._fields:
        other = SETTINGS._replace(**{name: 3})
        assert variance_based.read_rows(path, other) == {}


def test_tables_and_plot(tmp_path):
    results = {
        ("sgd", "variance-2"): Result(80.0, 1234.56, 1000.0),
        ("adam", "QSGD-7"): Result(86.5, 1.0, 10.25),
        ("sgd", "none"): Result(82.5, 1.0, 1.0),
    }
    lines = variance_based.tables(results)
    assert [line.split(" | ")[0] for line in lines if line] == [
        *("| Adam", "|" + "---|" * 7, "| QSGD-7"),
        *("| Momentum SGD", "|" + "---|" * 7, "| none", "| variance-2"),
    ]
    # In the paper 88.8 of 88.1, and 88.4 of 91.7.
    assert "| QSGD-7 | 86.50 |  | +0.7 | 1.0 | 12.3 | 10.2 |" in lines
    assert "| none | 82.50 | +0.00 | +0.0 | 1.0 | 1.0 | 1.0 |" in lines
    last = "| variance-2 | 80.00 | -2.50 | -3.3 | 1,234.6 | 383.6 | 1,000.0 |"
    assert lines[-1] == last
    variance_based.plot(tmp_path / "plot.png", results)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_has_a_place():
    text = compare_methods.README.read_text()
    changed = compare_methods.replace_table(text, "a table", "variance based")
    assert "begin -->\na table\n<!-- variance based: end -->" in changed
