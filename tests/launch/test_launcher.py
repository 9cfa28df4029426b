"""The launcher as a whole."""

import subprocess
import sys

import pytest

from tests.launch.processes import TIMEOUT, run

pytestmark = pytest.mark.timeout(120)


def test_runs_a_module(tmp_path, script):
    script("print('module', __name__, sys.argv[1:])", name="a_module.py")
    done = run("--workers", "2", "-m", "a_module", "x", env={"PYTHONPATH": tmp_path})
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{i}] module __main__ ['x']" for i in (0, 1)]


# Runs a module as a program, or calls the function of an entry point.
WITHOUT_TENSORFLOW = """
import contextlib, importlib, runpy, sys
name, _, function = sys.argv.pop(1).partition(":")
with contextlib.suppress(SystemExit):
    if function:
        getattr(importlib.import_module(name), function)()
    else:
        runpy.run_module(name, run_name="__main__")
print("imported:", *sorted({"tensorflow", "keras"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "tool", ["tfgradcomp.launch", "tfgradcomp.launch:main", "tfgradcomp.reshard"]
)
def test_tools_do_not_import_tensorflow(tool):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW, tool, "--help"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.stdout.startswith("usage:"), done.stderr
    assert done.stdout.endswith("imported:\n")
