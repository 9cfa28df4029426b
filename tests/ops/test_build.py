"""Tests of building and loading the library of native operations.

At most one library is compiled: where a test needs a build, it uses a compiler that
copies the library and counts its calls.
"""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tests.cluster import light_environment
from tfgradcomp.ops import __main__ as tool
from tfgradcomp.ops import build, library

# Code after which the library that an install left in the package is never loaded.
CACHE_ONLY = """
import pathlib
from tfgradcomp.ops import library
library._INSTALLED = pathlib.Path("/nowhere")
"""
PACK_TWICE = """
from tfgradcomp import ops
print(ops.pack_signs([1.0, -1.0, 1.0]).numpy(), ops.pack_signs([1.0]).numpy())
"""
PRINT_TYPES = """
import tensorflow as tf
graph = tf.function(ops.pack_signs).get_concrete_function([1.0]).graph
print(any(o.type == "Tfgradcomp>PackSigns" for o in graph.get_operations()))
"""
COPYING_COMPILER = """#!{python}
import shutil, sys, time
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if "--version" in sys.argv:
    print("a compiler that copies")
elif "-shared" in sys.argv:
    time.sleep(2)
    shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.fixture(scope="module")
def loaded():
    return library.library()


@pytest.fixture
def compiler(tmp_path, loaded):
    """Makes a compiler that copies the library; `lines` returns the commands it got."""
    log, path = tmp_path / "log", tmp_path / "c++"
    path.write_text(
        COPYING_COMPILER.format(
            python=sys.executable, log=str(log), library=str(loaded.path)
        )
    )
    path.chmod(0o755)
    return SimpleNamespace(path=path, lines=lambda: log.read_text().splitlines())


def environment(cache, **variables):
    inherited = {k: v for k, v in light_environment().items() if k != "TFGRADCOMP_OPS"}
    here = {"XDG_CACHE_HOME": str(cache), "TFGRADCOMP_CUDA": "0"}
    return {**inherited, **here, **{k: str(v) for k, v in variables.items()}}


def run(arguments, cache, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(cache, **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def make_driver(folder, version):
    """Builds a library of the driver that runs CUDA up to this version."""
    code = f"int cuDriverGetVersion(int* v) {{ *v = {version}; return 0; }}"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o"]
    target = folder / "libcuda.so.1"
    subprocess.run([*command, target], input=code, text=True, check=True)


@pytest.mark.slow
def test_processes_that_start_at_once_build_once(tmp_path, compiler):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CACHE_ONLY + PACK_TWICE + PRINT_TYPES],
            env=environment(tmp_path, CXX=compiler.path, TFGRADCOMP_OPS="native"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [out for out, _ in said] == ["[5] [1]\nTrue\n"] * 2, said
    assert sum("-shared" in line for line in compiler.lines()) == 1
    assert sum("building the native ops" in err for _, err in said) == 1
    left_out = "CUDA kernels left out: TFGRADCOMP_CUDA=0"
    assert sum(left_out in err for _, err in said) == 1
    made = sorted(path.name for path in (tmp_path / "tfgradcomp" / "ops").iterdir())
    assert made == [build.library_name(library.tensorflow(), cuda=False), "lock"]


def test_those_who_waited_do_not_repeat_a_build_that_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_INSTALLED", tmp_path)
    builds = []

    def fail(folder):
        builds.append(folder)
        raise build.BuildError("no such luck")

    monkeypatch.setattr(library, "_build", fail)
    now = time.time()
    with pytest.raises(build.BuildError, match="no such luck"):
        library._build_once([])
    monkeypatch.setattr(library.time, "time", lambda: now - 60)
    with pytest.raises(build.BuildError, match="no such luck"):
        library._build_once([])
    assert len(builds) == 1
    monkeypatch.undo()


@pytest.mark.slow  # `test_without_a_compiler_one_warning` builds in vain as well.
def test_without_a_compiler_native_mode_raises(tmp_path):
    done = run(
        ["-c", CACHE_ONLY + PACK_TWICE],
        tmp_path,
        CXX="/nowhere/c++",
        TFGRADCOMP_OPS="native",
    )
    assert done.returncode == 1
    assert "UnavailableError: TFGRADCOMP_OPS=native, but" in done.stderr
    assert "Could not run /nowhere/c++" in done.stderr
    assert "python -m tfgradcomp.ops --build" in done.stderr


@pytest.mark.slow  # The mode itself is chosen in `test_choosing`.
def test_python_mode_builds_nothing(tmp_path):
    code = CACHE_ONLY + PACK_TWICE + PRINT_TYPES
    done = run(["-c", code], tmp_path, CXX="/bin/false", TFGRADCOMP_OPS="python")
    assert done.stdout == "[5] [1]\nFalse\n", done.stderr
    assert "tfgradcomp" not in done.stderr
    assert not (tmp_path / "tfgradcomp").exists()


def test_a_library_for_another_tensorflow_is_not_taken(tmp_path, monkeypatch, loaded):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_INSTALLED", tmp_path)
    ours = library.tensorflow()
    others = [
        ours._replace(version="2.19.1"),
        ours._replace(revision="v2.21.0-rc0"),
        ours._replace(compile_flags=["-D_GLIBCXX_USE_CXX11_ABI=0"]),
    ]
    for name in (build.library_name(one, cuda) for one in others for cuda in (0, 1)):
        (tmp_path / name).write_bytes(loaded.path.read_bytes())
    assert library.find_library() is None
    fitting = tmp_path / build.library_name(library.tensorflow(), cuda=False)
    fitting.write_bytes(loaded.path.read_bytes())
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    assert library.find_library() == fitting


@pytest.mark.parametrize("place", ["installed", "tfgradcomp/ops"])
def test_kernels_for_the_gpu_are_worth_a_build_that_is_tried_once(
    tmp_path, monkeypatch, place
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_INSTALLED", tmp_path / "installed")
    for folder in (library._own_cache_folder(), library._INSTALLED):
        folder.mkdir(exist_ok=True)
    name = build.library_name(library.tensorflow(), cuda=False)
    without = tmp_path / place / name
    without.touch(mode=0o755)
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    monkeypatch.setattr(build, "find_nvcc", lambda: ("nvcc", "nvcc"))
    assert library.find_library() == without
    monkeypatch.setattr(library, "gpu_is_visible", lambda: True)
    assert library.find_library() is None

    def build_without(folder, *_):
        (folder / name).touch(mode=0o755)
        return folder / name

    monkeypatch.setattr(build, "build_library", build_without)
    built = library._build_once([])
    assert built == library.find_library() == library.cache_folder() / name


@pytest.mark.parametrize(
    ("driver", "toolkits", "taken"),
    [
        ((12, 4), [(13, 0), (12, 8), (12, 5), (11, 8)], (12, 8)),
        ((13, 0), [(13, 0), (12, 8)], (12, 8)),
        ((13, 0), [(13, 0), (11, 8)], (13, 0)),
        ((12, 4), [(13, 0), (11, 8)], (11, 8)),
        ((12, 4), [(13, 0)], None),
    ],
)
def test_a_toolkit_is_taken_that_the_driver_runs(monkeypatch, driver, toolkits, taken):
    for name in ("TFGRADCOMP_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    named = {f"nvcc{release}": release for release in toolkits}
    monkeypatch.setattr(build, "_all_nvcc", lambda: list(named))
    monkeypatch.setattr(build, "_release", named.get)
    monkeypatch.setattr(build, "driver_version", lambda: driver)
    nvcc, said = build.find_nvcc()
    assert named.get(nvcc) == taken
    if taken is None:
        assert said.startswith("left out: the driver runs CUDA up to 12.4")
        assert "nvcc(13, 0) (13.0)" in said


@pytest.mark.parametrize(
    ("wish", "for_others", "taken"),
    [(None, False, False), (None, True, True), ("1", False, True), ("0", True, False)],
)
def test_without_a_driver_kernels_are_for_other_machines(
    monkeypatch, wish, for_others, taken
):
    for name in ("TFGRADCOMP_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if wish is not None:
        monkeypatch.setenv("TFGRADCOMP_CUDA", wish)
    releases = {"new": (13, 0), "preferred": (12, 8)}
    monkeypatch.setattr(build, "_all_nvcc", lambda: list(releases))
    monkeypatch.setattr(build, "_release", releases.get)
    monkeypatch.setattr(build, "driver_version", lambda: None)
    nvcc, said = build.find_nvcc(for_others)
    assert nvcc == ("preferred" if taken else None)
    assert taken or "TFGRADCOMP_CUDA=" in said


def test_the_driver_is_asked_for_the_cuda_that_it_runs(tmp_path):
    code = f"exec(open({build.__file__!r}).read()); print(driver_version())"

    def asked():
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    (tmp_path / "libcuda.so.1").write_text("no library")
    assert asked() == "None\n"
    make_driver(tmp_path, 12040)
    assert asked() == "(12, 4)\n"


def test_what_was_built_on_purpose_goes_before_what_was_installed(
    tmp_path, monkeypatch, loaded
):
    installed = tmp_path / "installed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_INSTALLED", installed)
    installed.mkdir()
    library.cache_folder().mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    # From the last to the first choice.
    paths = []
    for folder, cuda, ready_made in [
        (installed, False, True),
        (installed, False, False),
        (library.cache_folder(), False, False),
        (installed, True, True),
        (installed, True, False),
        (library.cache_folder(), True, False),
    ]:
        path = folder / build.library_name(library.tensorflow(), cuda, ready_made)
        path.touch(mode=0o755)
        paths.append(path)
        assert library.find_library() == path
    # One that does not load gives way to the next.
    for path in reversed(paths):
        assert library.find_library(paths[paths.index(path) + 1 :]) == path
    assert library.find_library(paths) is None


def test_a_ready_made_library_serves_a_minor_version(monkeypatch):
    def name(tensorflow):
        return build.library_name(tensorflow, cuda=True, ready_made=True)

    ours = library.tensorflow()._replace(version="2.21.0", revision="v2.21.0-rc1")
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.34"))
    made = name(ours)
    assert made.startswith("libtfgradcomp_ops-tf2.21-") and made.endswith("-cuda.so")
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.41"))
    assert name(ours._replace(version="2.21.1", revision="v2.21.1")) == made
    assert name(ours._replace(version="2.20.0")) != made
    assert name(ours._replace(version="2.2.0")) != made
    assert name(ours._replace(compile_flags=["-D_GLIBCXX_USE_CXX11_ABI=0"])) != made
    monkeypatch.setattr(build, "source_hash", lambda: "of other sources")
    assert name(ours) != made


@pytest.mark.slow
def test_kernels_that_the_driver_cannot_run_are_not_registered(tmp_path, loaded):
    if not loaded.has_cuda:
        pytest.skip(loaded.built_with)
    make_driver(tmp_path, 10020)
    code = """
from tensorflow.python.framework import kernels
from tfgradcomp.ops import library
print(library.library().driver_problem)
found = kernels.get_registered_kernels_for_op("Tfgradcomp>PackSigns").kernel
print(sorted(kernel.device_type for kernel in found))
"""
    cache = loaded.path.parents[2]
    done = run(["-c", code], cache, LD_LIBRARY_PATH=tmp_path)
    assert "and the driver runs CUDA up to 10.2 only\n['CPU']\n" in done.stdout
    done = run(["-c", code], cache)
    assert done.stdout == "\n['CPU', 'GPU']\n", done.stderr


@pytest.mark.slow
def test_libraries_that_do_not_load_give_way_to_a_new_one(tmp_path, compiler):
    folder = tmp_path / "tfgradcomp" / "ops"
    folder.mkdir(mode=0o700, parents=True)
    name = build.library_name(library.tensorflow(), cuda=False)
    ready_made = build.library_name(library.tensorflow(), cuda=True, ready_made=True)
    for broken in (folder / name, tmp_path / ready_made):
        broken.write_text("broken")
    code = CACHE_ONLY.replace("/nowhere", str(tmp_path)) + PACK_TWICE + PRINT_TYPES
    done = run(["-c", code], tmp_path, CXX=compiler.path)
    assert done.stdout == "[5] [1]\nTrue\n", done.stderr
    for broken in (name, ready_made):
        assert f"{broken} cannot be loaded" in done.stderr
    assert done.stderr.count("another one is taken, or built") == 2
    assert sum("-shared" in line for line in compiler.lines()) == 1


def test_without_a_compiler_one_warning_says_what_to_do(tmp_path):
    folder = tmp_path / "tfgradcomp" / "ops"
    folder.mkdir(mode=0o700, parents=True)
    broken = folder / build.library_name(library.tensorflow(), cuda=False)
    broken.write_text("broken")
    done = run(["-c", CACHE_ONLY + PACK_TWICE], tmp_path, CXX="/bin/false")
    assert done.stdout == "[5] [1]\n", done.stderr
    assert done.stderr.count("RuntimeWarning: tfgradcomp falls back") == 1
    assert "/bin/false failed with status 1" in done.stderr
    assert "python -m tfgradcomp.ops --build" in done.stderr


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("part", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(tmp_path, monkeypatch, loaded, part, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_INSTALLED", tmp_path / "nowhere")
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    folder = library.cache_folder()
    folder.mkdir(mode=0o700, parents=True)
    path = folder / build.library_name(library.tensorflow(), cuda=False)
    path.write_bytes(loaded.path.read_bytes())
    path.chmod(0o755)
    assert library.find_library() == path
    {"folder": folder, "file": path}[part].chmod(mode)
    assert library.find_library() is None
    if part == "folder":
        with pytest.raises(build.BuildError, match=f"other users may.*mode={mode:o}"):
            library.build_library()


def test_nothing_is_built_into_what_others_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = library.cache_folder()
    folder.mkdir(mode=0o700, parents=True)
    if os.geteuid() == 0:
        # What belongs to root is anyone's to load.
        os.chown(folder, 1, 1)
    else:
        monkeypatch.setattr(library.os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(build.BuildError, match="belongs to another user"):
        library.build_library()


def test_a_changed_source_is_another_library(tmp_path, monkeypatch):
    (tmp_path / "kernels.h").write_text("// One.")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    before = build.library_name(library.tensorflow(), cuda=False)
    (tmp_path / "kernels.h").write_text("// Two.")
    assert build.library_name(library.tensorflow(), cuda=False) != before


def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "kernels.cc").write_text("no C++ at all;")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    with pytest.raises(build.BuildError, match="no C.. at all"):
        build.build_cpu_library(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()


@pytest.mark.slow  # `make` builds by the tool.
def test_the_tool_builds(tmp_path, compiler, monkeypatch, capsys):
    done = run(["-m", "tfgradcomp.ops", "--build"], tmp_path, CXX=compiler.path)
    name = build.library_name(library.tensorflow(), cuda=False)
    assert done.stdout == f"{tmp_path / 'tfgradcomp' / 'ops' / name}\n", done.stderr
    assert all(line.startswith("tfgradcomp: ") for line in done.stderr.splitlines())
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert tool.main(["--build"]) == 1
    assert "/bin/false failed with status 1" in capsys.readouterr().err


@pytest.mark.slow  # `make` runs the tool at each installation.
def test_the_tool_informs(tmp_path, loaded):
    cached = tmp_path / "tfgradcomp" / "ops" / loaded.path.name
    cached.parent.mkdir(parents=True)
    cached.write_bytes(loaded.path.read_bytes())
    done = run(["-m", "tfgradcomp.ops", "--info"], tmp_path, TFGRADCOMP_OPS="auto")
    assert done.returncode == 0 and done.stderr == ""
    assert f"TensorFlow:      {tf.__version__}\n" in done.stdout
    assert f"Cache:           {tmp_path / 'tfgradcomp' / 'ops'}\n" in done.stdout
    assert f"Built with:      TensorFlow {tf.__version__}; " in done.stdout
    assert f"Instruction set: {loaded.instruction_set}\n" in done.stdout
    assert "CUDA " in done.stdout
