"""Builds and calls the library that checks the CUDA kernels, verify.cc."""

import ctypes
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfgradcomp.ops import build

CUDA = build.source_folder() / "cuda"
KERNELS = sorted(CUDA.glob("*.cu"))


class Checks:
    """The functions of the library."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.gpu_count = self.library.tfgradcomp_gpu_count

    def verify(self, most: int) -> tuple[bool, str]:
        """Returns whether CPU and GPU agree on shapes of up to `most` elements."""
        return self._report("tfgradcomp_verify", most)

    def measure(self, size: int) -> tuple[bool, str]:
        """Returns whether all could be measured, and lines of CSV."""
        return self._report("tfgradcomp_measure", size)

    def _report(self, name: str, argument: int) -> tuple[bool, str]:
        function = self.library[name]
        function.restype = ctypes.c_bool
        report = ctypes.create_string_buffer(1 << 16)
        good = function(ctypes.c_int64(argument), report, ctypes.c_int64(len(report)))
        return good, report.value.decode()


def build_checks(
    folder: Path,
    cpu: Path,
    sources: Sequence[Path],
    compiler: Sequence[str],
    linker: Sequence[str],
) -> Checks:
    """Compiles the checks and `sources` and links them with the CPU's library."""

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.name}.o")
        run([*compiler, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [CUDA / "verify.cc", *sources]))
    library = folder / "libchecks.so"
    run([*linker, "-shared", *objects, str(cpu), "-o", str(library)])
    return Checks(library)


def run(command: Sequence[str]) -> None:
    """Runs a compiler; what it says is in the error."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[:4000]}"
