"""Tests of what is released: versions that must agree, the sdist and the wheel.

The wheel under test carries one ready-made library, that of this session's TensorFlow;
`make wheels` builds one for each version in the same way.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

import tfgradcomp
from tests.matrix import ROOT, TENSORFLOWS
from tfgradcomp.ops import build, library
from tools import wheels

TRAINING = """
import hashlib, keras, numpy as np, tensorflow as tf, tfgradcomp
from tfgradcomp import ops
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
x = np.random.default_rng(0).normal(size=(64, 200)).astype("float32")
y = x[:, :1] * 2
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(30), keras.layers.Dense(1)])
    optimizer = tfgradcomp.TernGrad(keras.optimizers.SGD(0.01), exclude=())
    model.compile(optimizer, "mse")
losses = model.fit(x, y, batch_size=16, epochs=5, verbose=0).history["loss"]
weights = b"".join(w.tobytes() for w in model.get_weights())
graph = tf.function(ops.pack_signs).get_concrete_function([1.0]).graph
types = {o.type for o in graph.get_operations()}
print("native:", "Tfgradcomp>PackSigns" in types)
print("learned:", losses[-1] < losses[0] / 2)
print("weights:", hashlib.sha256(weights).hexdigest())
print("from:", tfgradcomp.__file__)
"""


def test_the_wheel_is_for_all_supported_versions_of_tensorflow():
    assert wheels.minor_versions() == list(TENSORFLOWS)


def test_the_version_is_the_same_everywhere():
    version = re.sub(r"\.dev\d+$", "", tfgradcomp.__version__)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == version
    title = (ROOT / "docs" / "whats-new.md").read_text().splitlines()[0]
    assert title == f"# What is new in {version.rpartition('.')[0]}"


def environment(folder):
    """Makes an environment with what is here, less this package; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    # What an editable install has put there is not read.
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


def install(python, file, **variables):
    # An editable install here counts for none.
    options = ["--no-deps", "--no-cache-dir", "--ignore-installed", "--quiet"]
    subprocess.run(
        [python, "-m", "pip", "install", *options, file],
        cwd=file.parent,
        env=clean(TFGRADCOMP_CUDA="0", **variables),
        check=True,
        timeout=400,
    )


def clean(**variables):
    """The environment without what chooses another package, compiler or operations."""
    left_out = ("PYTHONPATH", "TFGRADCOMP_OPS", "CXX", "CUDA_HOME", "CUDA_PATH")
    return {k: v for k, v in os.environ.items() if k not in left_out} | variables


def train(python, folder):
    """Trains with two workers in a folder without a compiler; returns the output."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    here = {"PATH": str(python.parent), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [python.parent / "tfgradcomp-launch", "--workers", "2", "train.py"],
        cwd=folder,
        env=clean(**here),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("learned: True") == 2, done.stdout
    assert len(set(re.findall("weights: .*", done.stdout))) == 1, done.stdout
    assert done.stdout.count(f"from: {python.parents[1]}") == 2, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The sdist and the wheel."""
    folder = tmp_path_factory.mktemp("release")
    here = library.library()
    name = build.library_name(library.tensorflow(), here.has_cuda, ready_made=True)
    (folder / "libraries").mkdir()
    shutil.copy(here.path, folder / "libraries" / name)
    wheels.build_wheel(folder / "libraries", folder / "dist")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def tracked(*folders):
    """The files that git has in folders."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, check=True
    )
    return set(listed.stdout.decode().splitlines())


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_whole_package(released):
    sdist, wheel = released
    with tarfile.open(sdist) as archive:
        root = archive.getnames()[0]
        packed = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    files = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"}
    assert tracked("tfgradcomp", "custom_ops") | files <= packed
    assert not any(name.endswith(".so") for name in packed)
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"tfgradcomp/{name}" for name in tracked("custom_ops")}
    assert tracked("tfgradcomp") | sources <= names
    assert sum(name.endswith(".so") for name in names) == 1
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_wheel_serves_every_python_and_says_which_c_library_it_needs(released):
    tag = rf"py3-none-manylinux_2_\d+_{platform.machine()}"
    assert re.fullmatch(rf"tfgradcomp-[\w.]+-{tag}\.whl", released[1].name)


@pytest.mark.slow
def test_an_installed_wheel_trains_natively_without_a_compiler(released, tmp_path):
    python = environment(tmp_path / "environment")
    install(python, released[1])
    said = train(python, tmp_path / "training")
    assert said.count("native: True") == 2, said
    # Nothing was built, and nothing is said of it.
    assert not (tmp_path / "training" / "cache" / "tfgradcomp").exists()
    assert "native ops" not in said and "RuntimeWarning" not in said


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "/bin/false"])
def test_an_sdist_installs_with_and_without_a_compiler(released, tmp_path, compiler):
    python = environment(tmp_path / "environment")
    install(python, released[0], **({"CXX": compiler} if compiler else {}))
    said = train(python, tmp_path / "training")
    assert said.count(f"native: {compiler is None}") == 2, said
    assert ("tfgradcomp falls back to pure TensorFlow" in said) == bool(compiler)
