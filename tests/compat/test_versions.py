"""Backends and versions: a sentence at import, and the bounds of pyproject.toml."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.cluster import light_environment
from tfgradcomp.compat import versions

ROOT = Path(__file__).resolve().parents[2]


def test_another_backend_is_refused_at_import():
    # The other backends are not installed where tests run.
    code = "import keras; keras.backend.backend = lambda: 'jax'; import tfgradcomp"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=light_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tfgradcomp exchanges gradients by TensorFlow")
    assert "KERAS_BACKEND=tensorflow" in last
    assert last.endswith("Received: backend='jax'")


@pytest.mark.parametrize("backend", ["jax", "torch", "openvino"])
def test_every_other_backend_is_refused(backend):
    with pytest.raises(ImportError, match=f"Received: backend='{backend}'"):
        versions.check(backend, "3.15.1", "2.21.0")


@pytest.mark.parametrize(
    ("keras", "tensorflow"),
    [("3.10.0", "2.20.0"), ("3.15.1", "2.21.0"), ("3.15.0.dev2026", "2.21.0-rc1")],
)
def test_tested_versions_say_nothing(keras, tensorflow):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check("tensorflow", keras, tensorflow)


@pytest.mark.parametrize(
    ("keras", "tensorflow", "received"),
    [
        ("3.9.2", "2.21.0", "Keras==3.9.2"),
        ("3.16.0", "2.21.0", "Keras==3.16.0"),
        ("4.0.0", "2.21.0", "Keras==4.0.0"),
        ("3.15.1", "2.19.1", "TensorFlow==2.19.1"),
        ("3.15.1", "2.22.0-rc0", "TensorFlow==2.22.0-rc0"),
    ],
)
def test_other_versions_warn(keras, tensorflow, received):
    with pytest.warns(UserWarning, match=f"was tested with .*Received: {received}"):
        versions.check("tensorflow", keras, tensorflow)


def test_pyproject_has_the_same_bounds():
    text = (ROOT / "pyproject.toml").read_text()
    for name, bounds in (
        ("keras", versions.KERAS),
        ("tensorflow-cpu", versions.TENSORFLOW),
        (r"tensorflow\[and-cuda\]", versions.TENSORFLOW),
    ):
        first, end = ((".".join(map(str, bound))) for bound in bounds)
        assert re.search(rf'"{name}>={first},<{end}"', text), name
