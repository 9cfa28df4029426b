"""Keras' own tests of its optimizers, with every optimizer around the identity.

The tests are those of the source distribution of the Keras that is installed. It is
fetched from PyPI once and kept in the user's cache folder.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import keras
import pytest

from tfgradcomp.ops.library import cache_folder

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = (
    "keras/src/optimizers/*_test.py",
    "keras/src/backend/tensorflow/*distribute_test.py",
)
# What cannot hold for a wrapper, and why. All else must.
EXCEPTIONS = {
    "optimizer_test.py::OptimizerTest::test_get_method": (
        "asks for the class of an optimizer"
    ),
    "multi_optimizer_test.py::MultiOptimizerTest::"
    "test_multi_optimizer_blocks_nested_optimizers": (
        "asks for the class of an optimizer in a MultiOptimizer"
    ),
    "sgd_test.py::SGDTest::test_single_step": (
        "counts `variables`, to which a wrapper adds its own"
    ),
    "muon_test.py::MuonTest::test_adamw_weight_decay": (
        "calls the private `_apply_weight_decay`, which Muon overrides"
    ),
    "optimizer_sparse_test.py::OptimizerSparseTest::test_sparse_gradients_*": (
        "replaces methods of the optimizer by mocks, and not the inner optimizer's"
    ),
    "optimizer_distribute_test.py::OptimizerDistributeTest::"
    "test_gradient_accumulation": (
        "reads `_accumulated_gradients`: here they are N times as large, a worker's "
        "own mean"
    ),
    "optimizer_distribute_test.py::OptimizerDistributeTest::test_ema": (
        "hands one and the same tensor to all replicas, which TensorFlow does not sum"
    ),
}


@pytest.fixture(scope="module")
def sources():
    """The folder of the tests of the installed Keras."""
    folder = cache_folder().parent / f"keras-{keras.__version__}"
    if not folder.exists():
        _fetch(folder)
    if not folder.exists():
        pytest.skip(f"the sources of Keras {keras.__version__} hold no tests")
    return folder


@pytest.fixture(scope="module")
def report(sources, tmp_path_factory):
    """The outcomes of the tests in all files, as `run` returns them."""
    files = [file for pattern in FILES for file in sources.glob(pattern)]
    return run(sources, files, tmp_path_factory.mktemp("conformance"))


def run(sources, files, folder):
    """Runs the tests of files; returns, by name, "passed", "skipped" or the error."""
    path = folder / "report.json"
    plugins = ["-p", "tests.conformance.wrapping", "-p", "no:cacheprovider"]
    # Whole tracebacks of the exceptions would take half as long as the tests.
    options = ["-q", "--tb=short", "--import-mode=importlib", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, *map(str, files)],
        cwd=sources,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "CONFORMANCE_REPORT": str(path),
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())


def _fetch(folder):
    """Fetches the source distribution and keeps its tests."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{folder.name}.tar.gz"
    try:
        requirement = f"keras=={keras.__version__}"
        options = ["--no-deps", "--no-binary", ":all:", "--retries", "0", "--quiet"]
        run = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, requirement],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if run.returncode:
            pytest.skip(f"no source distribution of Keras: {run.stderr[-300:]}")
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, name = member.name.partition("/")
                if any(fnmatch(name, pattern) for pattern in FILES):
                    path = folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())
    except subprocess.TimeoutExpired:
        pytest.skip("no source distribution of Keras within 240 s")
    finally:
        archive.unlink(missing_ok=True)
        if not any(folder.rglob("*_test.py")):
            shutil.rmtree(folder)


def excepted(name):
    return any(fnmatch(name, pattern) for pattern in EXCEPTIONS)


def check(report):
    """Asserts that exceptions alone fail; returns the files with tests that passed."""
    failed = [
        f"{name}:\n{outcome}"
        for name, outcome in report.items()
        if outcome not in ("passed", "skipped") and not excepted(name)
    ]
    assert failed == [], "\n".join(failed)
    # Nearly all of them were run.
    passed = [name for name, outcome in report.items() if outcome == "passed"]
    assert len(passed) > 0.8 * len(report)
    return {name.partition("::")[0] for name in passed}


def test_keras_tests_of_adam_hold_around_the_identity(sources, tmp_path):
    path = sources / "keras/src/optimizers/adam_test.py"
    assert check(run(sources, [path], tmp_path)) == {path.name}


@pytest.mark.slow
def test_keras_tests_hold_around_the_identity(report):
    assert len(check(report)) >= 15


@pytest.mark.slow
def test_exceptions_are_still_needed(report):
    for pattern in EXCEPTIONS:
        outcomes = [v for name, v in report.items() if fnmatch(name, pattern)]
        if outcomes:
            # Those of a Keras without the test are none.
            assert set(outcomes) - {"passed", "skipped"}, pattern
