"""exchange.py from end to end, on LeNet and two workers."""

import argparse
import os
import signal
import sys
import time

import numpy as np
import pytest

from tests.benchmarks.scripts import (
    FOLDER,
    alive,
    descendants,
    import_script,
    rows_of,
    run,
    start,
)

FEW = ("--workload", "lenet", "--workers", 2, "--rounds", 2, "--no-torch")


@pytest.mark.slow  # A fault of the benchmark harms no training.
def test_the_files_and_what_they_say(tmp_path):
    code, output, errors = run(
        "exchange.py",
        *FEW,
        *("--methods", "SignSGD,Signum,DistEFSGD,TernGard"),
        *("--transports", "all_gather,all_reduce"),
        *("--output", tmp_path),
    )
    assert code == 0, errors
    # What cannot be is said and left out.
    assert "DistEFSGD, all_reduce is left out: transport='all_reduce'" in errors
    assert "TernGard, all_gather is left out: methods are classes" in errors
    rows = rows_of(tmp_path / "exchange_lenet.csv")
    assert set(rows) == {
        ("float32", "all_reduce"),
        ("float16", "all_reduce"),
        ("bfloat16", "all_reduce"),
        ("SignSGD", "all_gather"),
        ("SignSGD", "all_reduce"),
        ("Signum", "all_gather"),
        ("Signum", "all_reduce"),
        ("DistEFSGD", "all_gather"),
    }
    for row in rows.values():
        step, plain = float(row["step_ms"]), float(row["plain_ms"])
        assert float(row["exchange_ms"]) == pytest.approx(step - plain, abs=1e-6)
        assert min(step, plain) > 0
        assert row["elements"] == "431080"
    # On two workers a ring moves as much as the vector; signs take one bit an element,
    # the 1080 elements of small variables 32, and words that are not full a few bytes.
    declared = {key: float(r["declared_bytes_received"]) for key, r in rows.items()}
    assert declared["float32", "all_reduce"] == 4 * 431080
    packed = 430000 / 8 + 4 * 1080
    assert packed < declared["SignSGD", "all_gather"] < packed + 100
    # Signum is compared with momentum, SignSGD with none.
    assert (
        rows["Signum", "all_gather"]["plain_ms"]
        != (rows["SignSGD", "all_gather"]["plain_ms"])
    )
    assert "431080 elements; 2 workers" in output
    assert (tmp_path / "exchange_lenet.md").read_text().strip() == output.strip()


@pytest.mark.slow  # What transports sum is in `tests/transports`.
def test_float32_is_the_sum_and_plain_steps_exchange_nothing():
    measuring = import_script("measuring")
    exchange = import_script("exchange")
    names = ("SGD", "float32", "bfloat16", "SignSGD")
    task = {
        "workload": "lenet",
        "rounds": 1,
        "interface": None,
        "variants": [{"name": name, "transport": "all_gather"} for name in names],
    }
    answers = measuring.run("worker.py", task, exchange.commands(2), 1, 240)
    g = [first_gradients(rank) for rank in range(2)]
    for rank, answer in enumerate(answers):
        plain, float32, bfloat16, signs = (
            np.array(variant["update"]) for variant in answer["variants"]
        )
        np.testing.assert_allclose(plain, -1e-3 * g[rank], rtol=1e-5)
        # The sum: whoever trains divides the loss by N.
        np.testing.assert_allclose(float32, -1e-3 * (g[0] + g[1]), rtol=1e-4)
        np.testing.assert_allclose(bfloat16, -1e-3 * (g[0] + g[1]), atol=3e-5)
        votes = np.sign(g[0]) + np.sign(g[1])
        np.testing.assert_allclose(signs, -1e-3 * np.sign(votes))


def first_gradients(rank):
    """The first elements of the gradient of LeNet's largest kernel, the third."""
    rng = np.random.default_rng(rank)
    for count in (5 * 5 * 20, 20, 5 * 5 * 20 * 50, 50):
        rng.standard_normal(count, np.float32)
    return rng.standard_normal(8, np.float32)


@pytest.mark.parametrize(("equal", "moves"), [(True, False), (False, True)])
def test_times_that_say_nothing_are_refused(equal, moves):
    measuring = import_script("measuring")
    answers = [{"update": [1.0]}, {"update": [1.0 if equal else 2.0]}]
    with pytest.raises(RuntimeError, match="would say nothing about an exchange"):
        measuring._check("float32", answers, moves)


def test_rows_take_the_slowest_worker_of_each_round():
    measuring = import_script("measuring")
    workers = [{"seconds": [1.0, 5.0, 2.0]}, {"seconds": [4.0, 1.0, 3.0]}]
    assert measuring.slowest(workers) == 4.0


def test_apart_gives_every_method_its_own_processes():
    measuring = import_script("measuring")
    parser = argparse.ArgumentParser()
    measuring.add_arguments(parser, rounds=3)
    args = parser.parse_args(
        ["--apart", "--methods", "SignSGD,Signum", "--transports", "sharded"]
    )
    named = [
        [variant["name"] for variant in task["variants"]]
        for task in measuring.tasks(args, None)
    ]
    assert named == [
        ["SGD", "float32", "float16"],
        ["SGD", "float32", "bfloat16"],
        ["SGD", "float32", "SignSGD"],
        ["SGD", "SGD, momentum", "float32", "Signum"],
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_nothing_is_left_after_a_signal(name, tmp_path):
    process = start("exchange.py", *FEW, "--output", tmp_path)
    try:
        deadline = time.monotonic() + 60
        while len(children := descendants(process.pid)) < 3:
            assert time.monotonic() < deadline, children
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=60)
        while alive(children):
            assert time.monotonic() < deadline, children
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.returncode != 0
    assert os.listdir(tmp_path) == []


def test_a_failing_worker_is_shown_and_ends_the_run(tmp_path):
    processes = import_script("processes")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    failing = [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="exit code 3; the output:\nwhat went wrong"):
        with processes.Processes(tmp_path) as group:
            group.start(sleeper)
            group.start(failing)
            group.wait(60)
    assert alive(process.pid for process, _ in group._running) == []


def test_what_hangs_is_ended(tmp_path):
    processes = import_script("processes")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(RuntimeError, match="not ready after 0.5 s"):
        with processes.Processes(tmp_path) as group:
            group.start(sleeper)
            group.wait(0.5)
    assert alive(process.pid for process, _ in group._running) == []


def test_tables_go_between_their_markers(tmp_path):
    report = import_script("report")
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n")
    report.write_table(readme, "x", ["new", "lines"])
    expected = "a\n<!-- x: begin -->\nnew\nlines\n<!-- x: end -->\nb\n"
    assert readme.read_text() == expected
    with pytest.raises(ValueError, match="should hold the lines <!-- y: begin -->"):
        report.write_table(readme, "y", [])
    text = (FOLDER / "README.md").read_text()
    names = ("ops", "exchange", "exchange sweep")
    for name in (*names, "virtual cluster 1gbit", "virtual cluster 100mbit"):
        assert text.count(f"<!-- {name}: begin -->") == 1
        assert text.count(f"<!-- {name}: end -->") == 1


def test_the_line_above_a_table_names_every_run_of_its_rows(tmp_path):
    report = import_script("report")
    run = {"machine": "a, 2 cores", "date": "2026-01-02", "commit": "0"}
    rows = [{"way": "x", "ms": 1.5} | run, {"way": "y", "ms": 2.0} | run]
    line = "a, 2 cores; 7 rounds; 2026-01-02, commit 0."
    assert report.head("7 rounds", rows) == line
    path = tmp_path / "rows.csv"
    report.write_csv(path, ("way", "ms", *report.RUN), rows)
    later = {"machine": "b, 4 cores", "date": "2026-01-01", "commit": "1e5"}
    kept = report.kept_rows(path, ["way"], [{"way": "y", "ms": 3.0} | later])
    assert kept == [rows[0], {"way": "y", "ms": 3.0} | later]
    assert report.head("7 rounds", kept) == (
        "a, 2 cores and b, 4 cores; 7 rounds; 2026-01-01 to 2026-01-02, commits 0, 1e5."
    )
