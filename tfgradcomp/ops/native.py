"""The operations as native ones: `reference`'s names, signatures and results.

The library is loaded at its first use, and built before that where none fits. Any
function may raise `UnavailableError`; `tfgradcomp.ops` takes the reference then.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.ops import build
from tfgradcomp.ops.parts import Parts
from tfgradcomp.ops.reference import Statistics

NAMES = (
    "pack_codes",
    "unpack_codes",
    "pack_signs",
    "pack_momentum_signs",
    "pack_ternary",
    "block_statistics",
    "sum_codes",
    "sum_levels",
    "mean_of_signs",
    "find_levels",
    "pack_levels",
    "mean_of_levels",
    "majority_vote",
    "sign_error_feedback",
    "mean_sign_error_feedback",
    "mean_sign_sums",
    "mean_sign_residual",
    "pack_unambiguous",
    "pack_over_threshold",
    "mean_of_sparse",
)


class UnavailableError(RuntimeError):
    """There is no library that fits, and none could be built; the message says why."""


class Library(NamedTuple):
    """A library that is loaded.

    Attributes:
        path: Its file.
        operations: The module with its operations.
    """

    path: Path
    operations: ModuleType

    def has(self, name: str) -> bool:
        """Whether it has an operation of `NAMES`."""
        return hasattr(self.operations, f"tfgradcomp_{name}")

    @property
    def has_cuda(self) -> bool:
        """Whether it has kernels for GPUs."""
        return self.path.stem.endswith("-cuda")

    @property
    def built_with(self) -> str:
        """TensorFlow, compiler and CUDA that it was built with."""
        return self._text("tfgradcomp_built_with")

    @property
    def instruction_set(self) -> str:
        """The instruction set that its CPU kernels use on this machine."""
        return self._text("tfgradcomp_cpu_instruction_set")

    def _text(self, function: str) -> str:
        found = getattr(ctypes.CDLL(os.fspath(self.path)), function)
        found.restype = ctypes.c_char_p
        return found().decode()


# -- The library --------------------------------------------------------------------

_INSTALLED = Path(__file__).parent  # Where setup.py puts it.

_lock = threading.Lock()
_loaded: Library | str | None = None  # A text says why there is none.


def library() -> Library:
    """Returns the library; the first call loads it, and builds it where none fits.

    Raises:
        UnavailableError: If that is not possible.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = _load(find_library() or _build_once())
            except (build.BuildError, OSError, ImportError, RuntimeError) as error:
                _loaded = str(error)
    if isinstance(_loaded, str):
        raise UnavailableError(_loaded)
    return _loaded


@functools.cache
def gpu_problem(library: Library) -> str | None:
    """What keeps a library from serving the GPUs that TensorFlow sees, None if nothing.

    It is tried out once: a driver may be too old for the CUDA of the library, or a GPU
    for its kernels.
    """
    if not library.has_cuda:
        return f"it has no kernels for them ({library.built_with})"
    try:
        with tf.init_scope(), tf.device("GPU:0"):
            library.operations.tfgradcomp_pack_codes([1], base=2).numpy()
    except tf.errors.OpError as error:
        return f"they do not run its kernels ({library.built_with}): {error.message}"
    return None


def find_library() -> Path | None:
    """Returns the file of the library to load, None if there is none that fits."""
    installed, cached = _INSTALLED, cache_folder()
    places = [(installed, True), (cached, True), (cached, False), (installed, False)]
    if gpu_is_visible() and build.find_nvcc()[0] is not None:
        places.pop()  # A build gives more: kernels for the GPU.
    for folder, cuda in places:
        path = folder / build.library_name(tf.__version__, cuda)
        if path.is_file():
            return path
    return None


def build_library() -> Path:
    """Builds the library for this TensorFlow into the cache, and returns its path."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        return _build(folder)


def cache_folder() -> Path:
    """Returns the folder of the libraries that a first use built."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tfgradcomp" / "ops"


def gpu_is_visible() -> bool:
    """Whether TensorFlow would run operations on a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


def _load(path: Path) -> Library:
    try:
        operations = tf.load_op_library(os.fspath(path))
    except (tf.errors.OpError, RuntimeError) as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error
    for name in NAMES:
        tf.no_gradient("Tfgradcomp>" + name.title().replace("_", ""))
    return Library(path, operations)


def _build_once() -> Path:
    """Builds, unless another process does so at this moment: then waits for it."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    failure = folder / f"{build.library_name(tf.__version__, False)}.failed"
    with _locked(folder):
        found = find_library()
        if found is not None:
            return found
        if failure.is_file() and failure.stat().st_mtime > began:
            # N workers must not fail one after the other.
            raise build.BuildError(failure.read_text())
        try:
            return _build(folder)
        except build.BuildError as error:
            failure.write_text(str(error))
            raise


def _build(folder: Path) -> Path:
    _say(f"building the native ops for TensorFlow {tf.__version__}, once: about 30 s")
    flags = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
    return build.build_library(folder, build.TensorFlow(tf.__version__, *flags), _say)


@contextlib.contextmanager
def _locked(folder: Path):
    """Holds the folder's lock, which a process that ends gives back by itself."""
    import fcntl  # Not everywhere: without it there is no library, but the reference.

    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that builds the native ops")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: each builds for itself, the last one stays.
            pass
        yield


def _say(line: str) -> None:
    print(f"tfgradcomp: {line}", file=sys.stderr, flush=True)


# -- The operations -----------------------------------------------------------------


def pack_codes(codes: tf.Tensor, base: int) -> tf.Tensor:
    """As `reference.pack_codes`."""
    return _op("pack_codes")(tf.cast(codes, tf.int32), base=base)


def unpack_codes(words: tf.Tensor, base: int, count: int) -> tf.Tensor:
    """As `reference.unpack_codes`."""
    return _op("unpack_codes")(words, base=base, count=count)


def pack_signs(x: tf.Tensor | Parts, stream: tf.Tensor | None = None) -> tf.Tensor:
    """As `reference.pack_signs`."""
    return pack_signs_checked(x, stream)[0]


def pack_signs_checked(x: tf.Tensor | Parts, stream: tf.Tensor | None = None):
    """As `reference.pack_signs_checked`."""
    return tuple(_op("pack_signs")(_tensors(x), _optional(stream), x_scale=_scale(x)))


def pack_momentum_signs(
    x: tf.Tensor | Parts,
    momentum: tf.Tensor,
    beta: float,
    warming_up: tf.Tensor | bool,
    stream: tf.Tensor,
):
    """As `reference.pack_momentum_signs`."""
    return tuple(
        _op("pack_momentum_signs")(
            _tensors(x),
            momentum,
            warming_up,
            _optional(stream),
            beta=beta,
            one_minus_beta=1 - beta,
            x_scale=_scale(x),
        )
    )


def pack_ternary(
    x: tf.Tensor | Parts,
    limit: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor,
) -> tf.Tensor:
    """As `reference.pack_ternary`."""
    return _op("pack_ternary")(
        _tensors(x), limit, scale, _splits(row_splits), stream, x_scale=_scale(x)
    )


def block_statistics(x: tf.Tensor | Parts, row_splits: Sequence[int]) -> Statistics:
    """As `reference.block_statistics`."""
    table = _op("block_statistics")(_tensors(x), _splits(row_splits), x_scale=_scale(x))
    return Statistics(*tf.unstack(table))


def sum_codes(
    words: tf.Tensor, base: int, count: int, sum_base: int | None = None
) -> tf.Tensor:
    """As `reference.sum_codes`."""
    given = [] if sum_base is None else [sum_base]
    return _op("sum_codes")(words, base=base, count=count, sum_base=given)


def sum_levels(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    base: int,
    step: int,
    zero: int,
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """As `reference.sum_levels`."""
    return _in_parts(
        _op("sum_levels"),
        (words, scale, _splits(row_splits)),
        sizes,
        base=base,
        count=int(row_splits[-1]),
        step=step,
        zero=zero,
    )


def mean_of_signs(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """As `reference.mean_of_signs`."""
    return _in_parts(
        _op("mean_of_signs"),
        (words, scale, _splits(row_splits)),
        sizes,
        count=int(row_splits[-1]),
    )


def find_levels(
    x: tf.Tensor | Parts,
    row_splits: Sequence[int],
    rule: str,
    count: int,
    sweeps: int = 0,
):
    """As `reference.find_levels`."""
    return tuple(
        _op("find_levels")(
            _tensors(x),
            _splits(row_splits),
            rule=rule,
            count=count,
            sweeps=sweeps,
            x_scale=_scale(x),
        )
    )


def pack_levels(
    x: tf.Tensor | Parts,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """As `reference.pack_levels`."""
    return _op("pack_levels")(
        _tensors(x), levels, _splits(row_splits), _optional(stream), x_scale=_scale(x)
    )


def mean_of_levels(
    words: tf.Tensor,
    levels: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """As `reference.mean_of_levels`."""
    return _in_parts(
        _op("mean_of_levels"),
        (words, levels, _splits(row_splits)),
        sizes,
        count=int(row_splits[-1]),
    )


def majority_vote(
    words: tf.Tensor,
    count: int,
    base: int,
    reply_base: int,
    quorum: int = 0,
    stream: tf.Tensor | None = None,
) -> tf.Tensor:
    """As `reference.majority_vote`."""
    return _op("majority_vote")(
        words,
        _optional(stream),
        count=count,
        base=base,
        reply_base=reply_base,
        quorum=quorum,
    )


def sign_error_feedback(
    x: tf.Tensor | Parts,
    momentum: tf.Tensor | None,
    residual: tf.Tensor,
    mu: float,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """As `reference.sign_error_feedback`."""
    words, scale, new_residual, new_momentum = _op("sign_error_feedback")(
        _tensors(x),
        residual,
        ratio,
        moving,
        _splits(row_splits),
        _optional(momentum),
        mu=mu,
        x_scale=_scale(x),
    )
    return words, scale, new_momentum[0] if new_momentum else None, new_residual


def mean_sign_error_feedback(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    row_splits: Sequence[int],
):
    """As `reference.mean_sign_error_feedback`."""
    return tuple(
        _op("mean_sign_error_feedback")(
            sent_words, sent_scale, residual, ratio, moving, _splits(row_splits)
        )
    )


def mean_sign_sums(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    row_splits: Sequence[int],
):
    """As `reference.mean_sign_sums`."""
    return tuple(
        _op("mean_sign_sums")(
            sent_words, sent_scale, residual, ratio, _splits(row_splits)
        )
    )


def mean_sign_residual(
    sent_words: tf.Tensor,
    sent_scale: tf.Tensor,
    residual: tf.Tensor,
    ratio: tf.Tensor,
    moving: tf.Tensor,
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
) -> tf.Tensor:
    """As `reference.mean_sign_residual`."""
    return _op("mean_sign_residual")(
        sent_words,
        sent_scale,
        residual,
        ratio,
        moving,
        words,
        scale,
        _splits(row_splits),
    )


def pack_unambiguous(
    x: tf.Tensor | Parts,
    moments: tf.Tensor | Parts,
    residual: tf.Tensor,
    variance: tf.Tensor,
    alpha: float,
    decay: float,
    row_splits: Sequence[int],
):
    """As `reference.pack_unambiguous`."""
    return tuple(
        _op("pack_unambiguous")(
            _tensors(x),
            _tensors(moments),
            residual,
            variance,
            _splits(row_splits),
            x_scale=_scale(x),
            moments_scale=_scale(moments),
            alpha=alpha,
            decay=decay,
        )
    )


def pack_over_threshold(
    x: tf.Tensor | Parts,
    moments: tf.Tensor | Parts | None,
    residual: tf.Tensor,
    variance: tf.Tensor | None,
    threshold: float,
    alpha: float,
    decay: float,
):
    """As `reference.pack_over_threshold`."""
    words, new_residual, nonfinite, new_variance = _op("pack_over_threshold")(
        _tensors(x),
        [] if moments is None else _tensors(moments),
        residual,
        _optional(variance),
        x_scale=_scale(x),
        moments_scale=_scale(moments),
        threshold=threshold,
        alpha=alpha,
        decay=decay,
    )
    return words, new_residual, new_variance[0] if new_variance else None, nonfinite


def mean_of_sparse(
    words: tf.Tensor,
    scale: tf.Tensor,
    row_splits: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> tf.Tensor | Parts:
    """As `reference.mean_of_sparse`."""
    return _in_parts(
        _op("mean_of_sparse"),
        (words, scale, _splits(row_splits)),
        sizes,
        count=int(row_splits[-1]),
    )


def _op(name: str) -> Callable:
    return getattr(library().operations, f"tfgradcomp_{name}")


def _tensors(x: tf.Tensor | Parts) -> list[tf.Tensor]:
    """The parts of a vector; joined for a GPU, whose kernels read one tensor."""
    return list(x) if _in_pieces(x) else [tf.convert_to_tensor(x, tf.float32)]


def _scale(x: tf.Tensor | Parts | None) -> float:
    return x.gain if _in_pieces(x) else 1.0


def _in_pieces(x: tf.Tensor | Parts | None) -> bool:
    return isinstance(x, Parts) and not gpu_is_visible()


def _in_parts(operation: Callable, arguments: tuple, sizes, **attributes):
    """Calls an operation that writes a vector, into parts where it may."""
    in_place = sizes is not None and not gpu_is_visible()
    given = [int(size) for size in sizes] if in_place else [attributes["count"]]
    values = operation(*arguments, num_values=len(given), sizes=given, **attributes)
    if sizes is None:
        return values[0]
    return Parts(values if in_place else tf.split(values[0], sizes))


def _optional(tensor: tf.Tensor | None) -> list[tf.Tensor]:
    return [] if tensor is None else [tensor]


def _splits(row_splits: Sequence[int]) -> tf.Tensor:
    return tf.constant(row_splits, tf.int64)
