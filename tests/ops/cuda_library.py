"""Builds and calls the library that checks the CUDA kernels, verify.cc.

The standard library only, and nothing that imports TensorFlow: a machine with a GPU
needs a compiler, nvcc and this repository (`make gpu`).
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = REPOSITORY / "custom_ops" / "cuda"
KERNELS = sorted(CUDA.glob("*.cu"))
EMULATOR = Path(__file__).parent / "cuda_emulator"

# The macros of a library that takes small vectors for large ones: its thread blocks are
# so few that all loops take turns, a warp has as much to do as it ever has, and whole
# GPUs find levels.
AS_LARGE_VECTORS = (
    "-DTFGRADCOMP_MAX_THREAD_BLOCKS=3",
    "-DTFGRADCOMP_ENOUGH_WARPS=8",
    "-DTFGRADCOMP_LARGE_BLOCK=480",
)

EMULATED_FLAGS = "-std=c++17 -O1 -ffp-contract=off -fPIC -Wall -Wextra -Werror".split()
# Pragmas that ask nvcc to unroll.
EMULATED_FLAGS += ["-Wno-unknown-pragmas"]


class Checks:
    """The functions of the library."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.gpu_count = self.library.tfgradcomp_gpu_count

    def verify(
        self, most: int, few: bool = False, guard: int = 256, delay: int = 0
    ) -> tuple[bool, str]:
        """Returns whether CPU and GPU agree, and what there is to say.

        Args:
            most: The largest number of elements of a shape.
            few: Whether to check few shapes only.
            guard: Bytes behind each array that no kernel may write. With 0, an array
                ends where its memory ends, so that a sanitizer sees each access
                behind it, those that read too.
            delay: Bytes that the stream of the kernels has to set first.
        """
        return self._report(
            "tfgradcomp_verify",
            ctypes.c_int64(most),
            ctypes.c_bool(few),
            ctypes.c_int64(guard),
            ctypes.c_int64(delay),
        )

    def measure(self, size: int) -> tuple[bool, str]:
        """Returns whether all could be measured, and lines of CSV."""
        return self._report("tfgradcomp_measure", ctypes.c_int64(size))

    def _report(self, name: str, *arguments) -> tuple[bool, str]:
        function = self.library[name]
        function.restype = ctypes.c_bool
        report = ctypes.create_string_buffer(1 << 20)
        good = function(*arguments, report, ctypes.c_int64(len(report)))
        return good, report.value.decode()


def load_build() -> ModuleType:
    """Loads tfgradcomp/ops/build.py without the package, which needs TensorFlow."""
    path = REPOSITORY / "tfgradcomp" / "ops" / "build.py"
    spec = importlib.util.spec_from_file_location("tfgradcomp_build", path)
    module = importlib.util.module_from_spec(spec)
    # Its NamedTuple looks its module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_all(
    folder: Path,
    sources: Iterable[Path],
    compiler: Sequence[str],
    jobs: int = 2,
) -> tuple[list[Path], str]:
    """Compiles sources; returns the objects and what the compiler says."""

    def compiled(source: Path) -> tuple[Path, str]:
        target = folder / f"{source.name}.o"
        return target, run([*compiler, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(compiled, sources))
    return [target for target, _ in done], "".join(said for _, said in done)


def link(
    folder: Path, objects: Sequence[Path], cpu: Path, linker: Sequence[str]
) -> Path:
    """Links objects and the library of the CPU kernels to a library of checks."""
    library = folder / "libchecks.so"
    files = [str(path) for path in (*objects, cpu)]
    run([*linker, "-shared", *files, "-o", str(library)])
    return library


def build_with_nvcc(
    folder: Path, cpu: Path, nvcc: str, flags: Sequence[str], jobs: int = 2
) -> tuple[Path, str]:
    """Builds the checks by nvcc; returns the library and what the compiler says."""
    compiler = [nvcc, *flags, "-x", "cu"]
    objects, said = compile_all(folder, [CUDA / "verify.cc", *KERNELS], compiler, jobs)
    targets = [flag for flag in flags if flag.startswith("-gencode")]
    return link(folder, objects, cpu, [nvcc, "-cudart", "static", *targets]), said


def build_emulated(
    folder: Path, cpu: Path, macros: Sequence[str] = (), jobs: int = 2
) -> Path:
    """Builds the checks for the emulator, which needs no GPU and no CUDA."""
    compiler = ["g++", *EMULATED_FLAGS, *macros, f"-I{EMULATOR}"]
    sources = [CUDA / "verify.cc", *KERNELS, Path(__file__).parent / "emulated_cuda.cc"]
    objects, _ = compile_all(folder, sources, [*compiler, "-x", "c++"], jobs)
    return link(folder, objects, cpu, ["g++"])


def run(command: Sequence[str], seconds: float = 400) -> str:
    """Runs a compiler and returns what it says, which is in the error, too."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[:4000]}")
    return done.stdout
