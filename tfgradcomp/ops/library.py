"""Finds, loads and builds the library of native ops.

The library is loaded at its first use, and built before that if none fits. A wheel
carries ready-made libraries, so that nothing is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.core.logging import logger
from tfgradcomp.ops import build


class UnavailableError(RuntimeError):
    """No library fits and none could be built; the message says why."""


class Library(NamedTuple):
    """A loaded library: its file, and the module with its ops."""

    path: Path
    operations: ModuleType

    def has(self, op: str) -> bool:
        """Returns whether the library has an op of this name, without its prefix."""
        return hasattr(self.operations, f"tfgradcomp_{op}")

    @property
    def has_cuda(self) -> bool:
        """Returns whether the library has kernels for GPUs."""
        return self.path.stem.endswith("-cuda")

    @property
    def built_with(self) -> str:
        """Returns the TensorFlow, compiler and CUDA that the library was built with."""
        return self._text("tfgradcomp_built_with")

    @property
    def instruction_set(self) -> str:
        """Returns the instruction set that the CPU kernels use on this machine."""
        return self._text("tfgradcomp_cpu_instruction_set")

    @property
    def driver_problem(self) -> str:
        """Returns why this machine's driver cannot run the CUDA kernels, else ""."""
        return self._text("tfgradcomp_cuda_driver_problem") if self.has_cuda else ""

    def _text(self, function: str) -> str:
        found = getattr(ctypes.CDLL(os.fspath(self.path)), function)
        found.restype = ctypes.c_char_p
        return (found() or b"").decode()


_INSTALLED = Path(__file__).parent  # The folder into which setup.py builds.

_lock = threading.Lock()
_loaded: Library | str | None = None  # A text says why there is no library.


def library() -> Library:
    """Returns the library; the first call loads it, and builds it if none fits.

    Raises:
        UnavailableError: If it can neither be loaded nor built.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = _load_or_build()
            except (build.BuildError, OSError, ImportError, RuntimeError) as error:
                _loaded = str(error)
    if isinstance(_loaded, str):
        raise UnavailableError(_loaded)
    return _loaded


@functools.cache
def gpu_problem(library: Library) -> str | None:
    """Returns why a library cannot serve the visible GPUs, None if it can.

    If the driver is too old for the library's CUDA, the library has registered no
    kernels for GPUs. Else one op is tried, since the GPU may be too old.
    """
    if not library.has_cuda:
        return f"it has no kernels for GPUs ({library.built_with})"
    if library.driver_problem:
        return f"its kernels do not run: {library.driver_problem}"
    try:
        with tf.init_scope(), tf.device("GPU:0"):
            library.operations.tfgradcomp_pack_codes([1], base=2).numpy()
    except tf.errors.OpError as error:
        return f"its kernels do not run ({library.built_with}): {error.message}"
    return None


def find_library(broken: Collection[Path] = ()) -> Path | None:
    """Returns the file of the library to load, None if no file fits.

    The cache has what was built on this machine or on purpose, by `--build`. It goes
    before the library that was installed; a wheel's ready-made library comes last.
    None without kernels fits where a new build would add them for the GPU: the cache
    may come from a machine without GPUs. `broken` files are those that do not load.
    """
    cached = cache_folder()
    for cuda in (True, False):
        if not cuda and _would_add_cuda(broken):
            return None
        for folder, ready_made in (
            (cached, False),
            (_INSTALLED, False),
            (_INSTALLED, True),
        ):
            path = folder / build.library_name(tensorflow(), cuda, ready_made)
            is_trusted = path.is_file() and (folder == _INSTALLED or _is_own(path))
            if is_trusted and path not in broken:
                return path
    return None


def _would_add_cuda(broken: Collection[Path]) -> bool:
    """Returns whether a build could add kernels for a GPU; it has not failed to."""
    if not gpu_is_visible():
        return False
    made = cache_folder() / build.library_name(tensorflow(), cuda=True)
    is_new = made not in broken and not _failure(made).is_file()
    return is_new and build.find_nvcc()[0] is not None


def _failure(path: Path) -> Path:
    """Returns the file that says why a library could not be built."""
    return path.with_name(f"{path.name}.failed")


@functools.cache
def tensorflow() -> build.TensorFlow:
    """Returns the facts about this TensorFlow that a build needs."""
    flags = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
    return build.TensorFlow(tf.__version__, tf.version.GIT_VERSION, *flags)


def build_library() -> Path:
    """Builds the library for this TensorFlow into the cache, and returns its path."""
    with _locked(_own_cache_folder()) as folder:
        return _build(folder)


def cache_folder() -> Path:
    """Returns the folder of the libraries that were built on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tfgradcomp" / "ops"


def gpu_is_visible() -> bool:
    """Returns whether TensorFlow would run operations on a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


def _load_or_build() -> Library:
    """Loads the library that fits best; if it does not load, the next or a new one."""
    broken: list[Path] = []
    while True:
        path = find_library(broken) or _build_once(broken)
        try:
            operations = tf.load_op_library(os.fspath(path))
            return Library(path, operations)
        except (tf.errors.OpError, RuntimeError) as error:
            problem = f"{path} cannot be loaded: {error}"
            if path in broken:  # It was built anew.
                raise UnavailableError(problem) from error
            logger.warning("%s; another one is taken, or built", problem)
            broken.append(path)


def _own_cache_folder() -> Path:
    """Makes the folder of built libraries, and returns it."""
    folder = cache_folder()
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise build.BuildError(
            f"Nothing is built into {folder}, because it belongs to another user, or "
            "other users may write there and so run code as this user. Remove it, or "
            "set XDG_CACHE_HOME to a folder of your own. Received: "
            f"owner={folder.stat().st_uid}, mode={folder.stat().st_mode & 0o777:o}"
        )
    return folder


def _is_own(path: Path) -> bool:
    """Returns whether only this user, or root, may change a file and its folder."""
    states = path.stat(), path.parent.stat()
    return all(s.st_uid in (0, os.geteuid()) and not s.st_mode & 0o022 for s in states)


def _build_once(broken: Collection[Path]) -> Path:
    """Builds the library, or waits for another process that is building it."""
    folder = _own_cache_folder()
    began = time.time()
    failure = _failure(folder / build.library_name(tensorflow(), cuda=False))
    with _locked(folder):
        found = find_library(broken)
        if found is not None:
            return found
        if failure.is_file() and failure.stat().st_mtime > began:
            # All workers that waited fail at once, instead of building one by one.
            raise build.BuildError(failure.read_text())
        try:
            return _build(folder)
        except build.BuildError as error:
            failure.write_text(str(error))
            raise


def _build(folder: Path) -> Path:
    with_cuda = build.find_nvcc()[0] is not None
    takes = "minutes, with CUDA" if with_cuda else "about 30 s"
    text = "building the native ops for TensorFlow %s, once: %s"
    logger.info(text, tf.__version__, takes)
    path = build.build_library(folder, tensorflow(), logger.info)
    wanted = folder / build.library_name(tensorflow(), with_cuda)
    if path != wanted:
        _failure(wanted).touch()  # Nobody tries again at each start.
    return path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Holds the lock of a folder; the lock is released when the process ends."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds the native ops")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # The file system has no locks: each process builds a library, and the last
            # one replaces the others.
            pass
        yield folder
