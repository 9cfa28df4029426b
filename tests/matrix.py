"""Runs the tests of the seam to Keras and TensorFlow on several versions of them.

    make matrix
    python tests/matrix.py --all
    python tests/matrix.py --tensorflow 2.20 --keras 3.10.0 --python python3.12

Without arguments a covering list of combinations runs (`COVERING`), with `--all` every
one that pip can install, with other arguments those that they name. Each gets an
environment of its own, kept in build/matrix. Its result is written into the table of
docs/versions.md, with the date and the commit; the other rows stay. A Python that is
not on this machine is skipped.
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

_LOOPS, _OWN, _FIT, _BACKUP, _SAVING, _CONFIG, _MOMENTS = (
    f"tests/{name}.py::test"
    for name in (
        "fit/test_loops",
        "fit/test_own_loops",
        "fit/test_multi_worker_fit",
        "callbacks/test_backup",
        "engine/test_saving",
        "optimizers/test_serialization",
        "per_example/test_second_moments",
    )
)
# What touches private names, and what is saved and loaded again: of each kind the
# quickest test that shows it. Methods, transports and kernels depend on no version.
TESTS = (
    f"{_LOOPS}_stop_of_one_worker_ends_fit_on_all",
    f"{_LOOPS}_stop_of_one_worker_ends_evaluate_and_predict_on_all",
    f"{_LOOPS}_workers_with_data_of_different_lengths_end_epochs_together",
    f"{_LOOPS}_statistics_are_means_and_no_step_lacks_rows[two]",
    f"{_OWN}_model_without_call_trains_as_in_one_process",
    f"{_OWN}_xla_with_several_replicas_is_refused[two]",
    f"{_OWN}_batches_of_unknown_rank_build_a_model",
    "tests/collectives/test_strategies.py",
    "tests/compat/test_per_replica_variable.py",
    f"{_FIT}_identity_compressor_is_plain_keras",
    f"{_FIT}_stock_fit_is_that_of_one_process_on_the_global_batch",
    f"{_FIT}_predict_and_evaluate_see_every_row_in_order",
    f"{_FIT}_a_worker_without_rows_evaluates_and_predicts",
    f"{_FIT}_dict_inputs",
    f"{_FIT}_one_overflow_skips_and_halves_everywhere",
    f"{_FIT}_workers_that_share_paths_do_not_spoil_files",
    f"{_FIT}_building_a_model_opens_no_iterator",
    f"{_BACKUP}_save_freq_resumes_within_an_epoch_in_the_same_bits",
    f"{_BACKUP}_sigterm_to_one_worker_makes_all_save_and_end",
    "tests/fit/test_run_state.py",
    "tests/fit/test_past_iterators.py",
    "tests/optimizers/test_inner_optimizers.py",
    "tests/optimizers/test_wrapper.py",
    "tests/assignment/test_rules.py",
    f"{_SAVING}_saved_models_and_checkpoints_resume_with_the_same_bits"
    "[DistEFBlockSGDM-window]",
    f"{_SAVING}_weights_files_and_checkpoints_are_restored_in_graphs",
    f"{_CONFIG}_wrappers_come_back_with_all_arguments",
    f"{_CONFIG}_every_optimizer_comes_back_with_its_method",
    "tests/optimizers/test_variance_based_in_fit.py::test_manners_of_fit",
    "tests/per_example/test_models.py",
    "tests/per_example/test_moment_rules.py::test_microbatches",
    f"{_MOMENTS}_recomputed_layers",
    f"{_MOMENTS}_fit_passes_the_moments_of_each_batch",
    f"{_MOMENTS}_mixed_precision_passes_unscaled_moments",
    "tests/parameter_server/test_remote_worker.py",
    "tests/checkpoint/test_saved_files.py",
    "tests/ops/test_choosing.py",
    "tests/ops/test_codes.py::test_unpacking_keeps_leading_axes",
    "tests/ops/test_build.py::test_without_a_compiler_one_warning_says_what_to_do",
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

    @property
    def conflict(self) -> str | None:
        """Why pip cannot install it, as the packages say; None where it can."""
        python, tensorflow, keras = (
            [int(number) for number in re.findall(r"\d+", name)] for name in self
        )
        if tensorflow >= [2, 21] and keras < [3, 12]:
            return "TensorFlow 2.21 needs Keras 3.12 or newer"
        if keras >= [3, 13] and python < [3, 11]:
            return "Keras 3.13 needs Python 3.11 or newer"
        return None

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
        # An import compiles what it needs; the whole of TensorFlow takes minutes.
        install = [self.interpreter, "-m", "pip", "install", "--no-compile", "-q"]
        subprocess.run([*install, *packages], check=True)
        (self.environment / "done").touch()

    def test(self, tests: list[str]) -> str:
        """Runs the tests; returns the last line of pytest, or why there is none."""
        log = self.environment / "log.txt"
        with log.open("w") as file:
            subprocess.run(
                [self.interpreter, "-m", "pytest", "-q", "-m", "not slow", *tests],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return result_of(log.read_text())


# Each Keras once and each pair of Python and TensorFlow once: the oldest together, the
# newest together, and the newest that Python 3.10 can have.
COVERING = (
    Combination("python3.10", "2.20", "3.10.0"),
    Combination("python3.11", "2.20", "3.11.3"),
    Combination("python3.10", "2.21", "3.12.4"),
    Combination("python3.12", "2.20", "3.13.2"),
    Combination("python3.11", "2.21", "3.14.1"),
    Combination("python3.12", "2.21", "3.15.1"),
)


def chosen(arguments: argparse.Namespace) -> list[Combination]:
    """Returns the combinations that the arguments name and pip can install."""
    named = arguments.python, arguments.tensorflow, arguments.keras
    if not (arguments.all or any(named)):
        return [*COVERING]
    versions = [
        names or known
        for names, known in zip(named, (PYTHONS, TENSORFLOWS, KERAS), strict=True)
    ]
    product = [Combination(*names) for names in itertools.product(*versions)]
    return [one for one in product if one.conflict is None]


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
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--python", nargs="+")
    parser.add_argument("--tensorflow", nargs="+")
    parser.add_argument("--keras", nargs="+")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    arguments = parser.parse_args()
    commit = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True)
    origin = f"{datetime.date.today()}, {commit.stdout.strip()}"
    is_bad = False
    for combination in chosen(arguments):
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
        is_bad |= not re.fullmatch(r"\d+ passed((?!failed|error).)*", result)
        if [*arguments.tests] == [*TESTS]:
            TABLE.write_text(with_row(TABLE.read_text(), combination, result, origin))
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
