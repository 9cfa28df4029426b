"""Folders in which workers keep their state: `worker-<rank>/epoch-<n>`.

A folder is written under another name and renamed when it is complete and on the disk.
It says how large its files are, so that one that has lost a part does not count.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

KEPT = 2
"""Epochs that a worker keeps: workers that die together may be one epoch apart."""

WEIGHTS = "state.weights.h5"
"""The file of weights and optimizer state in the folder of an epoch."""

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


def worker_folder(directory: str | Path, rank: int) -> Path:
    """Returns the folder of one worker."""
    return Path(directory) / f"worker-{rank}"


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Returns the folder of one epoch of a worker; epochs count from 1."""
    return folder / f"epoch-{epoch:06d}"


def epochs_in(folder: Path) -> list[int]:
    """Returns the epochs that a worker has completely, in ascending order."""
    return [epoch for epoch in _named(folder) if _is_whole(epoch_folder(folder, epoch))]


def read_origin(folder: Path, epoch: int) -> Origin:
    """Returns which worker, of how many, wrote an epoch."""
    metadata = _metadata(epoch_folder(folder, epoch))
    return Origin(metadata["rank"], metadata["num_workers"])


def write(folder: Path, epoch: int, origin: Origin, save: Callable) -> None:
    """Writes one epoch, completely or not at all, and drops the oldest ones.

    Args:
        folder: The worker's folder.
        epoch: Number of finished epochs.
        origin: The worker.
        save: Called with the folder that it has to write into.
    """
    target = epoch_folder(folder, epoch)
    unfinished = folder / f".unfinished-{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save(unfinished)
    sizes = {p.name: p.stat().st_size for p in unfinished.iterdir()}
    # A whole folder may have been copied.
    sizes.pop(_METADATA, None)
    metadata = {**origin._asdict(), "sizes": sizes}
    (unfinished / _METADATA).write_text(json.dumps(metadata))
    for path in (*unfinished.iterdir(), unfinished):
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    _sync(folder)
    first = epochs_in(folder)[-KEPT:][0]
    for old in _named(folder):
        if old < first:
            shutil.rmtree(epoch_folder(folder, old))


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    found = (re.fullmatch(r"epoch-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _metadata(folder: Path) -> dict:
    return json.loads((folder / _METADATA).read_text())


def _is_whole(folder: Path) -> bool:
    """Returns whether the files of an epoch are there, as long as they were written.

    Backups of version 0.1 do not say how long.
    """
    try:
        sizes = _metadata(folder).get("sizes", {})
        return all((folder / name).stat().st_size == n for name, n in sizes.items())
    except (OSError, ValueError):
        return False
