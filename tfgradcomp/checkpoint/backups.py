"""Folders in which workers keep their state: `worker-<rank>/epoch-<n>[-batch-<k>]`.

A folder is written under another name and renamed when it is complete and on the disk.
It records the sizes of its files, so that a folder that has lost a part is ignored.
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
"""Number of points kept: the newest may be damaged, or missing on some workers."""

WEIGHTS = "state.weights.h5"
"""Name of the file of weights and optimizer state in a point's folder."""

DIGEST = "trainable.sha256"
"""Name of the file with a hash of the trainable weights, equal on all workers."""

_METADATA = "metadata.json"


class Origin(NamedTuple):
    """The worker that wrote a folder.

    Attributes:
        rank: Index of the worker.
        num_workers: Number of workers at that time.
    """

    rank: int
    num_workers: int


class Point(NamedTuple):
    """A point of a training at which state is saved; later points are greater.

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


def weights_file(folder: Path, point: Point) -> Path:
    """Returns the file of weights and optimizer state of one point of a worker."""
    return point_folder(folder, point) / WEIGHTS


def points_in(folder: Path) -> list[Point]:
    """Returns the points whose files are complete, in ascending order."""
    return [point for point in _named(folder) if _is_whole(point_folder(folder, point))]


def read_origin(folder: Path, point: Point) -> Origin:
    """Returns the worker that wrote a point."""
    metadata = _metadata(point_folder(folder, point))
    return Origin(metadata["rank"], metadata["num_workers"])


def is_first(folder: Path, point: Point) -> bool:
    """Returns whether all workers had no older backup when this one was written.

    Backups of version 0.1, written at the end of each epoch, do not record it.
    """
    return _metadata(point_folder(folder, point)).get("is_first", point.epoch < 2)


def write(
    folder: Path, point: Point, origin: Origin, save: Callable, is_first: bool = False
) -> None:
    """Writes one point, completely or not at all.

    Args:
        folder: The worker's folder.
        point: The point.
        origin: The worker.
        save: Function that writes the files into the folder it is given.
        is_first: True if all workers have no older backup.
    """
    target = point_folder(folder, point)
    unfinished = folder / f".unfinished-{target.name}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _check_space(folder)
        save(unfinished)
        sizes = {p.name: p.stat().st_size for p in unfinished.iterdir()}
        # `save` may have copied a folder, metadata included.
        sizes.pop(_METADATA, None)
        metadata = {**origin._asdict(), "is_first": is_first, "sizes": sizes}
        (unfinished / _METADATA).write_text(json.dumps(metadata))
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        # The worker's folder may be new, too.
        for path in (folder, folder.parent):
            _sync(path)
    except BaseException:
        # Frees the space on a full disk.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def drop_old(folder: Path) -> None:
    """Removes unfinished points, and all but the newest complete points.

    Call it when all workers have the newest point: before, an older point may be the
    last that all workers have.
    """
    for unfinished in folder.glob(".unfinished-*"):
        shutil.rmtree(unfinished)
    kept = points_in(folder)[-KEPT:]
    for point in _named(folder):
        if kept and point < kept[0]:
            shutil.rmtree(point_folder(folder, point))


def remove(folder: Path, point: Point) -> None:
    """Removes a point, as far as possible."""
    shutil.rmtree(point_folder(folder, point), ignore_errors=True)


def _check_space(folder: Path) -> None:
    """Raises OSError if the disk has less room than the newest point takes.

    HDF5 does not recover from a full disk: the process may crash when it exits.
    """
    needed = 0
    for point in points_in(folder)[-1:]:
        needed = sum(_metadata(point_folder(folder, point)).get("sizes", {}).values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        message = f"{needed} bytes are needed, {free} are free"
        raise OSError(errno.ENOSPC, message, str(folder))


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, have reached the disk."""
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
    """Returns whether the files of a point have the sizes that were written.

    Backups of version 0.1 have no record of the sizes.
    """
    try:
        metadata = _metadata(folder)
        sizes = metadata.get("sizes", {})
        whole = all((folder / name).stat().st_size == n for name, n in sizes.items())
        return whole and {*Origin._fields} <= metadata.keys()
    except (OSError, ValueError, AttributeError):
        return False
