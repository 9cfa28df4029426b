"""Turns the backups of N workers into those of M.

What differs between workers (residuals, momenta) becomes the mean over the N workers on
each of the M: the mean is what the weights are still owed, and it is conserved. Shards
of a server's state are put together, so that M workers can shard them anew.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import h5py
import numpy as np

from tfgradcomp.checkpoint import backups


def reshard(old: str | Path, num_workers: int, out: str | Path) -> int:
    """Writes `out`, a backup of `num_workers` workers, from the backup `old`.

    Args:
        old: Directory of a `tfgradcomp.callbacks.BackupAndRestore`.
        num_workers: M.
        out: Directory to write; must not exist.

    Returns:
        The epoch: the newest that all old workers have.

    Raises:
        ValueError: If `old` is not whole, its workers' weights differ, or `out` is
            there already.
    """
    if num_workers < 1:
        raise ValueError(f"workers must be at least 1. Received: {num_workers}")
    if Path(out).exists():
        raise ValueError(f"The output must not exist yet. Received: out={out}")
    folders, epoch = _find(Path(old))
    sources = [backups.epoch_folder(folder, epoch) for folder in folders]
    files = [source / backups.WEIGHTS for source in sources]
    means, wholes = _means(files), _wholes(files)
    for rank in range(num_workers):

        def save(folder, rank=rank):
            shutil.copytree(sources[0], folder, dirs_exist_ok=True)
            with h5py.File(folder / backups.WEIGHTS, "r+") as file:
                for name, value in means.items():
                    file[name][...] = value
                for name, value in wholes.items():
                    del file[name]
                    file[name.replace(".server_shard.", ".server.")] = value
                for group in _state_groups(file):
                    group["place"][...] = (rank, num_workers)
                    group.pop("shards", None)

        backups.write(backups.worker_folder(out, rank), epoch, num_workers, save)
    return epoch


def _find(old):
    """The workers' folders and the newest epoch that all of them have."""
    first = backups.worker_folder(old, 0)
    epochs = backups.epochs_in(first)
    if not epochs:
        raise ValueError(
            "No backup found: expected folders worker-0/epoch-<n>, worker-1/..., as "
            f"tfgradcomp.callbacks.BackupAndRestore writes them. Received: {old}"
        )
    count = backups.read_num_workers(first, epochs[-1])
    folders = [backups.worker_folder(old, rank) for rank in range(count)]
    common = set.intersection(*(set(backups.epochs_in(folder)) for folder in folders))
    if not common:
        raise ValueError(
            f"The backup is of {count} workers, which have no epoch in common. Put all "
            f"their folders into one directory. Received: "
            f"{ {folder.name: backups.epochs_in(folder) for folder in folders} }"
        )
    return folders, max(common)


def _state_groups(file):
    """The groups of a file that hold the state of a compressed optimizer."""
    groups = []
    file.visititems(
        lambda _, item: (
            groups.append(item)
            if isinstance(item, h5py.Group) and "place" in item
            else None
        )
    )
    return groups


def _means(files):
    """The mean over workers of every dataset that may differ between them."""
    for path in files[1:]:
        with h5py.File(files[0]) as first, h5py.File(path) as other:
            _check_equal(first, other, path)
    return {
        # One value for each local replica, all the same.
        name: np.broadcast_to(total.mean(0, keepdims=True) / len(files), total.shape)
        for name, total in _totals(files, ".worker.").items()
    }


def _wholes(files):
    """The state of sharded servers: zeros stand where others hold a shard."""
    return {
        name: np.broadcast_to(total.sum(0, keepdims=True), total.shape).astype(
            "float32"
        )
        for name, total in _totals(files, ".server_shard.").items()
    }


def _totals(files, mark):
    """The sums over files of the datasets of state whose names have a mark."""
    totals: dict = {}
    for path in files:
        with h5py.File(path) as file:
            for group in _state_groups(file):
                for name in group:
                    if mark in name:
                        value = group[name][...].astype(np.float64)
                        full = f"{group.name}/{name}"
                        totals[full] = totals.get(full, 0) + value
    return totals


def _check_equal(first, other, path):
    def visit(name, item):
        if not isinstance(item, h5py.Dataset) or not name.startswith("layers/"):
            return
        if name not in other or not np.array_equal(item[...], other[name][...]):
            raise ValueError(
                "The workers' weights differ: these backups are not of one training. "
                f"Received: {name} in {path}"
            )

    first.visititems(visit)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tfgradcomp.reshard", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("old", help="directory of BackupAndRestore")
    parser.add_argument("--workers", type=int, required=True, help="new number")
    parser.add_argument("--out", required=True, help="directory to write")
    arguments = parser.parse_args(argv)
    try:
        epoch = reshard(arguments.old, arguments.workers, arguments.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"{arguments.out}: epoch {epoch} for {arguments.workers} workers")


if __name__ == "__main__":
    main()
