"""The choice of slow tests that are due, and the table of their passes."""

import csv
import re
import subprocess
import sys

import pytest

from tests import slow_runs
from tests.matrix import ROOT

TESTS = """
import pytest

pytestmark = pytest.mark.slow

def test_passes(request):
    assert request.node.get_closest_marker("timeout").args == (960,)

def test_fails(): assert False

def test_is_skipped(): pytest.skip("stands for a test of a GPU")

@pytest.mark.parametrize("size", ["1, 2"])
def test_with_a_comma(size): pass
"""
CONFTEST = """
from pathlib import Path
from tests import slow_runs

slow_runs.TABLE = Path(__file__).with_name("table.csv")
pytest_addoption = slow_runs.add_options

def pytest_configure(config):
    config.pluginmanager.register(slow_runs.SlowRuns(config))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    return tmp_path


def run(folder, *options):
    """Runs the tests of a folder and returns what pytest says."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "--rootdir", folder, "-c", folder / "pytest.ini", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one", "xdist"])
def test_only_passes_are_recorded(folder, processes):
    assert "none has passed" in run(folder, *processes)
    assert not (folder / "table.csv").exists()
    run(folder, "--record", *processes)
    with open(folder / "table.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["test"] for row in rows] == [
        "test_some.py::test_passes",
        "test_some.py::test_with_a_comma[1, 2]",
    ]
    assert all(re.fullmatch(r"[0-9a-f]{7,}\+?", row["commit"]) for row in rows)
    assert "slow tests: 2 have passed" in run(folder)
    # A minute is left for one of the two that have never passed.
    assert "1 passed" not in run(folder, "--due", "1")
    assert "2 passed" in run(folder, "--due", "10")


def test_those_come_first_that_passed_the_longest_ago(monkeypatch):
    rows = {
        "new": {"seconds": "50.0", "date": "2026-11-27"},
        "old": {"seconds": "50.0", "date": "2026-11-25"},
    }
    monkeypatch.setattr(slow_runs, "read", lambda: rows)
    assert slow_runs.due(["new", "old", "never"], 1) == {"never"}
    assert slow_runs.due(["new", "old", "never"], 2) == {"never", "old"}
    assert slow_runs.due(["new", "old", "never"], 3) == {"never", "old", "new"}


def test_each_row_is_of_a_test():
    for name in slow_runs.read():
        path, function = re.fullmatch(r"(.*)::(\w+)(?:\[.*\])?", name, re.S).groups()
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M), name
