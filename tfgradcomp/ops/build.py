"""Builds the native ops from `custom_ops`.

This file imports the standard library only: setup.py loads the file by its path, before
there is a package or a TensorFlow.

A library's name states what the library fits: the version of TensorFlow, whose C++
interface changes with each minor version; the C library; whether there are CUDA
kernels; and, by a hash, the sources, the build of TensorFlow and its binary interface.
Wheels carry ready-made libraries, which fit every patch release of a minor version. The
name of the wheel states which C library they need.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

# Two, so that a build at a first use leaves the machine to others.
_JOBS = 2

# No option may change a result: contraction rounds once where the reference rounds
# twice.
_OPTIMIZE = ["-O3", "-ffp-contract=off", "-fno-math-errno"]
INSTRUCTIONS = {
    "avx2": ["-mavx2", "-mbmi2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mbmi2"],
}

# A kernel also runs on later architectures of the same major number. The driver of any
# other GPU compiles the PTX, which serves GPUs of its architecture and newer ones.
_CUDA_ARCHITECTURES = [70, 75, 80, 90, 100, 120]
_PTX_ARCHITECTURE = 90

# The CUDA of TensorFlow's own wheels: it needs no newer driver than TensorFlow does.
_PREFERRED_CUDA = 12

_ASK_TENSORFLOW = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
flags = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
print(json.dumps([tf.__version__, tf.version.GIT_VERSION, *flags]))
"""


class BuildError(Exception):
    """A build failed; the message states the reason."""


class TensorFlow(NamedTuple):
    """The facts about a TensorFlow that a build needs.

    `revision` is the commit that it was built from. The flags are those of
    `tf.sysconfig`.
    """

    version: str
    revision: str
    compile_flags: Sequence[str]
    link_flags: Sequence[str]


def ask_tensorflow(python: str = sys.executable) -> TensorFlow:
    """Asks a Python interpreter for the facts about its TensorFlow."""
    # Isolated (-I), it sees the installed packages in pip's build environment, too.
    command = [python, "-I", "-c", _ASK_TENSORFLOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise BuildError(f"{python} cannot import TensorFlow: {reason[0]}")
    return TensorFlow(*json.loads(done.stdout.splitlines()[-1]))


def source_folder() -> Path:
    """Returns the folder of the C++ sources, in the package or beside it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "custom_ops", package.parent / "custom_ops"):
        if (folder / "kernels.h").is_file():
            return folder
    raise BuildError(
        "The C++ sources of tfgradcomp are missing; install the package again. "
        f"Expected: {package / 'custom_ops'}"
    )


def source_hash() -> str:
    """Returns a hash of the sources and of this file, which states the flags."""
    folder = source_folder()
    suffixes = (".h", ".cc", ".cu", ".cuh")
    files = [path for path in folder.rglob("*") if path.suffix in suffixes]
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(files):
        digest.update(f"\n{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def library_name(tensorflow: TensorFlow, cuda: bool, ready_made: bool = False) -> str:
    """Returns the file name of the library that fits a TensorFlow on this machine.

    A wheel carries the `ready_made` libraries.
    """
    # The places of the headers (-I) do not matter.
    facts = sorted(f for f in tensorflow.compile_flags if not f.startswith("-I"))
    if ready_made:
        minor_version = ".".join(tensorflow.version.split(".")[:2])
        fits = [f"tf{minor_version}", platform.machine()]
    else:
        libc = "".join(platform.libc_ver())
        fits = [f"tf{tensorflow.version}", platform.machine(), libc]
        facts.insert(0, tensorflow.revision)
    facts.insert(0, source_hash())
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    key = "-".join([*fits, digest, "cuda" if cuda else "cpu"])
    return f"libtfgradcomp_ops-{key}.so"


def find_nvcc(for_others: bool = False) -> tuple[str | None, str]:
    """Returns the nvcc to build with, or None, and its path or why there is none.

    The toolkit that `CUDA_HOME` or `CUDA_PATH` names is taken without a check. Else a
    toolkit is taken that the driver of this machine can run, CUDA 12 before any other.
    Without a driver there is no GPU: kernels are compiled only with `TFGRADCOMP_CUDA=1`
    or `for_others`, for other machines. Then any toolkit will do.
    """
    wish = os.environ.get("TFGRADCOMP_CUDA")
    if wish == "0":
        return None, "left out: TFGRADCOMP_CUDA=0"
    if not list((source_folder() / "cuda").glob("*.cu")):
        return None, "left out: there are no sources"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        nvcc = shutil.which("nvcc", path=os.path.join(os.environ.get(name, ""), "bin"))
        if os.environ.get(name) and nvcc is not None:
            return nvcc, nvcc
    releases = ((_release(nvcc), nvcc) for nvcc in reversed(_all_nvcc()))
    # The first of several equal releases stays.
    found = {release: nvcc for release, nvcc in releases if release is not None}
    if not found:
        return None, "left out: no nvcc in CUDA_HOME, PATH or /usr/local/cuda*"
    driver = driver_version()
    if driver is None and wish != "1" and not for_others:
        return None, (
            "left out: there is no driver of a GPU here. TFGRADCOMP_CUDA=1 compiles "
            "them for machines that have one"
        )
    fits = [release for release in found if driver is None or release[0] <= driver[0]]
    if driver is not None and not fits:
        newer = ", ".join(f"{nvcc} ({r[0]}.{r[1]})" for r, nvcc in found.items())
        return None, (
            f"left out: the driver runs CUDA up to {driver[0]}.{driver[1]}, but all "
            f"toolkits are newer: {newer}. Install a toolkit of CUDA {driver[0]}, or a "
            "newer driver"
        )
    best = max(fits, key=lambda release: (release[0] == _PREFERRED_CUDA, release))
    return found[best], found[best]


def driver_version() -> tuple[int, int] | None:
    """Returns the newest CUDA that this machine's driver runs, None without a driver.

    It asks the driver's library alone, which starts no CUDA and needs no GPU.
    """
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    if failed or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _all_nvcc() -> list[str]:
    """Returns the nvcc of each toolkit in PATH, in /usr/local/cuda and beside it."""
    places = os.environ.get("PATH", "").split(os.pathsep)
    places += map(str, sorted(Path("/usr/local").glob("cuda*/bin")))
    found = [shutil.which("nvcc", path=place) for place in places if place]
    return list(dict.fromkeys(filter(None, found)))


def _release(nvcc: str) -> tuple[int, int] | None:
    """Returns the release of a toolkit, or None if its nvcc does not run."""
    try:
        output = _run([nvcc, "--version"])
    except BuildError:
        return None
    numbers = re.search(r"release (\d+)\.(\d+)", output)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def build_library(
    folder: str | os.PathLike,
    tensorflow: TensorFlow,
    say: Callable = print,
    ready_made: bool = False,
) -> Path:
    """Builds the library of ops into a folder, and returns its path.

    Args:
        folder: Folder to build into. It is made if it is missing.
        tensorflow: The TensorFlow that the library shall fit.
        say: Function that is called with a line if CUDA is left out, and why.
        ready_made: Whether the library is for a wheel, and so for machines with GPUs.

    Raises:
        BuildError: If a compiler is missing or fails, with its output.
    """
    sources = source_folder() / "tensorflow"
    compiler = _run([*_compiler(), "--version"]).splitlines()[0]
    # As system headers: warnings about TensorFlow's headers would bury an error.
    flags = [re.sub("^-I", "-isystem", flag) for flag in tensorflow.compile_flags]
    glue = [*_compiler(), "-fPIC", *flags, "-O2", "-DNDEBUG", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory(prefix="tfgradcomp-build-") as scratch:
        nvcc, cuda = find_nvcc(for_others=ready_made)
        gpu_objects: list[str] = []
        if nvcc is not None:
            try:
                nvcc_flags, cuda = cuda_flags(nvcc)
                files = sorted((source_folder() / "cuda").glob("*.cu"))
                kernels = [(file, [nvcc, *nvcc_flags]) for file in files]
                gpu_objects = _compile(kernels, scratch)
            except BuildError as error:
                nvcc, cuda = None, f"left out: {error}"
        if nvcc is None:
            say(f"CUDA kernels {cuda}")
        cuda = cuda.splitlines()[0]
        built_with = f"TensorFlow {tensorflow.version}; {compiler}; CUDA {cuda}"
        define = f"-DTFGRADCOMP_BUILT_WITH={json.dumps(built_with)}"
        jobs = [
            (sources / "ops.cc", [*glue, define]),
            (sources / "kernels_cpu.cc", glue),
            *_cpu_jobs(),
        ]
        if nvcc is not None:
            jobs.append((sources / "kernels_gpu.cc", glue))
        objects = [*_compile(jobs, scratch), *gpu_objects]
        path = Path(folder) / library_name(tensorflow, nvcc is not None, ready_made)
        _link(objects, tensorflow.link_flags, path, nvcc)
    return path


def build_cpu_library(path: str | os.PathLike) -> Path:
    """Builds the CPU kernels alone, without TensorFlow: the C functions of cpu/cpu.h.

    It returns the path of the library, as `build_library` does.
    """
    with tempfile.TemporaryDirectory(prefix="tfgradcomp-build-") as scratch:
        _link(_compile(_cpu_jobs(), scratch), [], Path(path))
    return Path(path)


def _cpu_jobs() -> list[tuple[Path, list[str]]]:
    """Returns the files of the CPU kernels and their commands.

    A file whose name ends in `_avx2` is compiled with the flags of AVX2, and so on.
    """
    command = [*_compiler(), "-std=c++17", "-fPIC", *_OPTIMIZE]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    jobs = []
    for file in sorted((source_folder() / "cpu").glob("*.cc")):
        instructions = INSTRUCTIONS.get(file.stem.rpartition("_")[2], [])
        if is_x86 or not instructions:
            jobs.append((file, [*command, *instructions]))
    return jobs


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "There is no C++ compiler: none of g++, c++, clang++ is in PATH. Install g++, "
        "or set CXX"
    )


def _compile(jobs: list[tuple[Path, list[str]]], scratch: str) -> list[str]:
    """Compiles files, each by its command, and returns the object files."""

    def run(job):
        file, command = job
        target = os.path.join(scratch, file.name + ".o")
        _run([*command, "-c", str(file), "-o", target])
        return target

    with concurrent.futures.ThreadPoolExecutor(_JOBS) as pool:
        waiting = [pool.submit(run, job) for job in jobs]
        try:
            return [job.result() for job in waiting]
        finally:
            for job in waiting:
                job.cancel()


def cuda_flags(nvcc: str) -> tuple[list[str], str]:
    """Returns the flags for CUDA kernels, and a text that names what they build."""
    known = {
        int(line.rpartition("_")[2])
        for line in _run([nvcc, "--list-gpu-arch"]).split()
        if line.rpartition("_")[2].isdigit()
    }
    taken = [number for number in _CUDA_ARCHITECTURES if number in known]
    if not taken:
        raise BuildError(f"{nvcc} knows none of sm_{_CUDA_ARCHITECTURES}")
    ptx = max((n for n in taken if n <= _PTX_ARCHITECTURE), default=taken[0])
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in taken]
    codes.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC"]
    release = _run([nvcc, "--version"]).partition("release ")[2].partition(",")[0]
    names = " ".join(f"sm_{n}" for n in taken) + f" and PTX of compute_{ptx}"
    return [*flags, "-cudart", "static", *codes], f"{release}: {names}"


def _link(
    objects: list[str], flags: Sequence[str], path: Path, nvcc: str | None = None
) -> None:
    """Links into a folder beside `path` and moves the file: nobody loads half of it."""
    if nvcc is None:
        command = [*_compiler(), "-shared", *objects, *flags]
    else:
        # nvcc knows where the CUDA runtime is. With a static runtime, the library also
        # loads on a machine without CUDA.
        command = [nvcc, "-shared", "-cudart", "static", *objects]
        for flag in flags:
            command += ["-Xlinker", flag]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
        unfinished = os.path.join(folder, path.name)
        _run([*command, "-o", unfinished])
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, path)


def _run(command: list[str]) -> str:
    """Runs a compiler and returns its output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"Could not run {command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(
            f"{command[0]} failed with status {done.returncode}: {shlex.join(command)}"
            f"\n{done.stdout[:4000]}"
        )
    return done.stdout
