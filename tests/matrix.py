"""Runs the tests of the seam to Keras and TensorFlow on several versions of them.

    make matrix
    python tests/matrix.py --tensorflow 2.20 --keras 3.10.0 --python python3.12

Each combination gets an environment of its own, kept in build/matrix. Its result is
written into the table of docs/versions.md, with the date and the commit; the other rows
stay. A Python that is not on this machine is skipped.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "matrix"
TABLE = ROOT / "docs" / "versions.md"
PYTHONS = ("python3.10", "python3.11", "python3.12")
TENSORFLOWS = ("2.20", "2.21")
KERAS = ("3.10.0", "3.11.3", "3.12.4", "3.13.2", "3.14.1", "3.15.1")
# What touches private names, and what is saved and loaded again.
TESTS = (
    "tests/compat",
    "tests/callbacks",
    "tests/optimizers/test_bad_input.py",
    "tests/optimizers/test_partition.py",
    "tests/optimizers/test_saving.py",
    "tests/optimizers/test_serialization.py",
    "tests/optimizers/test_step.py",
    "tests/per_example",
    "tests/checkpoint/test_saved_by_0_1.py",
)
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
HEAD = "| Python | TensorFlow | Keras | result | date, commit |"


class Combination(NamedTuple):
    """Versions that are tested together."""

    python: str
    tensorflow: str
    keras: str

    @property
    def environment(self) -> Path:
        """The folder of its environment."""
        return ENVIRONMENTS / f"{self.python}-tf{self.tensorflow}-keras{self.keras}"

    def has_python(self) -> bool:
        """Returns whether the Python is on this machine and runs."""
        command = [self.python, "-c", ""]
        if shutil.which(self.python) is None:
            return False
        return subprocess.run(command, capture_output=True).returncode == 0

    @property
    def interpreter(self) -> Path:
        """The Python of its environment."""
        return self.environment / "bin" / "python"

    def install(self) -> None:
        """Makes the environment, unless it is there.

        Raises:
            subprocess.CalledProcessError: If the packages cannot be installed.
        """
        if (self.environment / "done").exists():
            return
        shutil.rmtree(self.environment, ignore_errors=True)
        subprocess.run([self.python, "-m", "venv", self.environment], check=True)
        packages = [
            f"tensorflow-cpu=={self.tensorflow}.*",
            f"keras=={self.keras}",
            *("h5py", "numpy", "typing_extensions>=4.5", "scikit-learn>=1.4"),
            *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5"),
        ]
        install = [self.interpreter, "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True)
        (self.environment / "done").touch()

    def test(self, tests: list[str]) -> str:
        """Runs the tests; returns the last line of pytest, or why there is none."""
        log = self.environment / "log.txt"
        with log.open("w") as file:
            subprocess.run(
                [self.interpreter, "-m", "pytest", "-q", *tests],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return result_of(log.read_text())


def result_of(output: str) -> str:
    """Returns the numbers of tests that pytest reports, without the duration."""
    found = re.findall(r"^(?:=+ )?(\d+ .*?) in [\d.]+s", output, re.M)
    return found[-1] if found else "ended without a result"


def with_row(text: str, combination: Combination, result: str, origin: str) -> str:
    """Returns the text of the table with the row of a combination put in or replaced.

    Args:
        text: The text of docs/versions.md.
        combination: The versions.
        result: The cell of the result.
        origin: The cell of date and commit.
    """
    before, begin, rest = text.partition(BEGIN)
    body, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The text must hold {BEGIN} and then {END}.")
    key = f"| {' | '.join(combination)} |"
    rows = [line for line in body.splitlines() if line.startswith("| python")]
    rows = [row for row in rows if not row.startswith(key)]
    rows = sorted([*rows, f"{key} {result} | {origin} |"], key=_order)
    table = "\n".join([HEAD, "|---" * 5 + "|", *rows])
    return f"{before}{begin}\n{table}\n{end}{after}"


def _order(row):
    return [int(number) for number in re.findall(r"\d+", row)[:7]]


def main() -> None:
    """Tests the combinations that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--tensorflow", nargs="+", default=TENSORFLOWS)
    parser.add_argument("--keras", nargs="+", default=KERAS)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    arguments = parser.parse_args()
    commit = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True)
    origin = f"{datetime.date.today()}, {commit.stdout.strip()}"
    is_bad = False
    for names in itertools.product(
        arguments.python, arguments.tensorflow, arguments.keras
    ):
        combination = Combination(*names)
        if not combination.has_python():
            print(f"{combination.python} is not on this machine", flush=True)
            continue
        start = time.monotonic()
        try:
            combination.install()
            result = combination.test([*arguments.tests])
        except subprocess.CalledProcessError as error:
            result = f"not installed: {error}"
        seconds = time.monotonic() - start
        print(f"{' '.join(combination)}: {result} ({seconds:.0f} s)", flush=True)
        is_bad |= not re.fullmatch(r"\d+ passed.*", result) or "failed" in result
        if [*arguments.tests] == [*TESTS]:
            TABLE.write_text(with_row(TABLE.read_text(), combination, result, origin))
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
