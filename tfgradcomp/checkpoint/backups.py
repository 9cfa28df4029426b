"""Folders in which workers keep their state: `worker-<rank>/epoch-<n>[-batch-<k>]`.

A folder is written under another name and renamed when it is complete and on the disk.
It says how large its files are, so that one that has lost a part does not count.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

KEPT = 2
"""Points that a worker keeps: the newest may be damaged, or not be on all workers."""

WEIGHTS = "state.weights.h5"
"""The file of weights and optimizer state in the folder of a point."""

DIGEST = "trainable.sha256"
"""The file with a hash of the trainable weights, which are equal on all workers."""

_METADATA = "metadata.json"


class Origin(NamedTuple):
    """The worker that wrote a folder.

    Attributes:
        rank: Its index.
        num_workers: N at that time.
    """

    rank: int
    num_workers: int


class Point(NamedTuple):
    """A moment of a training. Later moments are greater.

    Attributes:
        epoch: Number of finished epochs.
        batch: Number of batches that the next epoch has taken.
    """

    epoch: int
    batch: int = 0

    def __str__(self):
        return f"epoch {self.epoch}" + (f", batch {self.batch}" if self.batch else "")


def worker_folder(directory: str | Path, rank: int) -> Path:
    """Returns the folder of one worker."""
    return Path(directory) / f"worker-{rank}"


def point_folder(folder: Path, point: Point) -> Path:
    """Returns the folder of one point of a worker."""
    batch = f"-batch-{point.batch:06d}" if point.batch else ""
    return folder / f"epoch-{point.epoch:06d}{batch}"


def points_in(folder: Path) -> list[Point]:
    """Returns the points that a worker has completely, in ascending order."""
    return [point for point in _named(folder) if _is_whole(point_folder(folder, point))]


def read_origin(folder: Path, point: Point) -> Origin:
    """Returns which worker, of how many, wrote a point."""
    metadata = _metadata(point_folder(folder, point))
    return Origin(metadata["rank"], metadata["num_workers"])


def is_first(folder: Path, point: Point) -> bool:
    """Returns whether no older backup was on all workers when this one was written.

    Backups of version 0.1 do not say; they were written as each epoch ended.
    """
    return _metadata(point_folder(folder, point)).get("is_first", point.epoch < 2)


def write(
    folder: Path, point: Point, origin: Origin, save: Callable, is_first: bool = False
) -> None:
    """Writes one point, completely or not at all.

    Args:
        folder: The worker's folder.
        point: The moment.
        origin: The worker.
        save: Called with the folder that it has to write into.
        is_first: Whether there is no older backup on all workers.
    """
    target = point_folder(folder, point)
    unfinished = folder / f".unfinished-{target.name}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _check_space(folder)
        save(unfinished)
        sizes = {p.name: p.stat().st_size for p in unfinished.iterdir()}
        # A whole folder may have been copied.
        sizes.pop(_METADATA, None)
        metadata = {**origin._asdict(), "is_first": is_first, "sizes": sizes}
        (unfinished / _METADATA).write_text(json.dumps(metadata))
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        # The folder's own name may be new, too.
        for path in (folder, folder.parent):
            _sync(path)
    except BaseException:
        # A full disk would stay full.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def drop_old(folder: Path) -> None:
    """Removes all but the newest points that are whole, and what was left unfinished.

    To be called when all workers have the newest point: before, an older one may be the
    last that all of them have.
    """
    for left in folder.glob(".unfinished-*"):
        shutil.rmtree(left)
    kept = points_in(folder)[-KEPT:]
    for point in _named(folder):
        if kept and point < kept[0]:
            shutil.rmtree(point_folder(folder, point))


def remove(folder: Path, point: Point) -> None:
    """Removes a point, as far as possible."""
    shutil.rmtree(point_folder(folder, point), ignore_errors=True)


def _check_space(folder: Path) -> None:
    """Raises OSError if there is no room for as much as the newest point takes.

    HDF5 does not recover from a disk that is full: the process may crash at its end.
    """
    sizes = [_metadata(point_folder(folder, p)) for p in points_in(folder)[-1:]]
    needed = sum(sum(one.get("sizes", {}).values()) for one in sizes)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{needed} bytes are needed, {free} are free", str(folder)
        )


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(folder: Path) -> list[Point]:
    names = os.listdir(folder) if folder.is_dir() else []
    found = (re.fullmatch(r"epoch-(\d+)(?:-batch-(\d+))?", name) for name in names)
    return sorted(Point(int(match[1]), int(match[2] or 0)) for match in found if match)


def _metadata(folder: Path) -> dict:
    return json.loads((folder / _METADATA).read_text())


def _is_whole(folder: Path) -> bool:
    """Returns whether the files of a point are there, as long as they were written.

    Backups of version 0.1 do not say how long.
    """
    try:
        metadata = _metadata(folder)
        sizes = metadata.get("sizes", {})
        whole = all((folder / name).stat().st_size == n for name, n in sizes.items())
        return whole and {*Origin._fields} <= metadata.keys()
    except (OSError, ValueError, AttributeError):
        return False
