"""Folders of compiled programs, kept in the user's cache until a source changes."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tfgradcomp.ops import library

PARENT = library.cache_folder().parent / "tests"
TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parents[1] / "custom_ops", TESTS
# Folders of one name; the oldest ones are removed.
NUM_KEPT = 4


def kept_folder(
    name: str, facts: Iterable[str], make: Callable[[Path], object]
) -> Path:
    """Returns the folder that `make(folder)` filled once for the present sources.

    Args:
        name: Name of what is compiled.
        facts: What the contents depend on besides all C++ sources and the compiler.
        make: Compiles into an empty folder. After an error, nothing is kept.
    """
    PARENT.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = PARENT / f"{name}-{_digest(facts)}"
    with open(PARENT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=PARENT) as scratch:
                folder = Path(scratch) / "made"
                folder.mkdir()
                make(folder)
                folder.rename(path)
        # The time says when a folder was used last.
        os.utime(path)
        for old in sorted(PARENT.glob(f"{name}-*"), key=os.path.getmtime)[:-NUM_KEPT]:
            shutil.rmtree(old)
    return path


def _digest(facts):
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True)
    digest = hashlib.sha256(version.stdout + platform.machine().encode())
    for file in sorted(file for folder in SOURCES for file in folder.rglob("*")):
        if file.suffix in (".h", ".cc", ".cu"):
            digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()[:16]
