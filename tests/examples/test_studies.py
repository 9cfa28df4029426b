"""The studies' quick forms, run as `make studies-quick` does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
# The others are modules that they share.
STUDIES = [
    path
    for path in sorted(ROOT.glob("examples/studies/*.py"))
    if "__main__" in path.read_text()
]


def state_of_the_tree():
    """Returns what differs from the last commit, with its content."""
    commands = (["status", "--porcelain"], ["diff", "HEAD"])
    return [
        subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
        for command in commands
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_quick_form_prints_a_table_and_writes_nothing(path):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone")
    before = state_of_the_tree()
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, path, "--quick"],
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) >= 2, run.stdout
    columns = {row.replace(r"\|", "").count("|") for row in rows}
    assert len(columns) == 1, run.stdout
    assert state_of_the_tree() == before


def test_the_target_of_make_runs_each_of_them():
    listed = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "studies-quick"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for path in (*STUDIES, ROOT / "examples/leaderboard.py"):
        assert str(path.relative_to(ROOT)) in listed
    assert "study.py" not in listed
    # The first that fails ends it.
    assert "set -e" in listed and "--quick" in listed
