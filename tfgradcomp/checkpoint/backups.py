"""Folders that workers keep their state in: `worker-<rank>/epoch-<n>`.

Written under another name and renamed when complete, so that what is there is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

KEPT = 2
"""Epochs that a worker keeps: workers that die together may be one epoch apart."""

WEIGHTS = "state.weights.h5"
"""The file of weights and optimizer state in the folder of an epoch."""

_METADATA = "metadata.json"


def worker_folder(directory: str | Path, rank: int) -> Path:
    """Returns the folder of one worker."""
    return Path(directory) / f"worker-{rank}"


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Returns the folder of one epoch of a worker; epochs count from 1."""
    return folder / f"epoch-{epoch:06d}"


def epochs_in(folder: Path) -> list[int]:
    """Returns the epochs that a worker has whole, in ascending order."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = (re.fullmatch(r"epoch-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def read_num_workers(folder: Path, epoch: int) -> int:
    """Returns how many workers there were when an epoch was written."""
    text = (epoch_folder(folder, epoch) / _METADATA).read_text()
    return json.loads(text)["num_workers"]


def write(folder: Path, epoch: int, num_workers: int, save: Callable) -> None:
    """Writes one epoch, whole or not at all, and drops the oldest ones.

    Args:
        folder: The worker's folder.
        epoch: Number of finished epochs.
        num_workers: N, for whoever restores.
        save: Called with the folder that it shall write into.
    """
    target = epoch_folder(folder, epoch)
    unfinished = folder / f".unfinished-{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save(unfinished)
    (unfinished / _METADATA).write_text(json.dumps({"num_workers": num_workers}))
    for path in unfinished.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    for old in epochs_in(folder)[:-KEPT]:
        shutil.rmtree(epoch_folder(folder, old))
