"""Conversion of the backups of N workers into those of M.

State that differs between workers (residuals, momenta) becomes its mean over the N
workers on each of the M workers, which conserves the mean residual. The parts of a
server's state are joined, so that every new worker has all of it and M workers can
divide it again.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.state_file import PLACE, join_groups, state_groups


def reshard(old: str | Path, num_workers: int, out: str | Path) -> backups.Point:
    """Writes `out`, a backup of `num_workers` workers, from the backup `old`.

    Args:
        old: Directory of a `tfgradcomp.callbacks.BackupAndRestore`.
        num_workers: M.
        out: Directory to write; must not exist.

    Returns:
        The point of the training: the newest that all old workers have, with equal
        weights.

    Raises:
        ValueError: If `old` is not complete, if its workers' weights differ, or if
            `out` exists.
        OSError: If a file cannot be read or written.
    """
    if num_workers < 1:
        raise ValueError(f"workers must be at least 1. Received: {num_workers}")
    if Path(out).exists():
        raise ValueError(f"The output must not exist yet. Received: out={out}")
    folders, point = _find(Path(old))
    sources = [backups.point_folder(folder, point) for folder in folders]
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(h5py.File(source / backups.WEIGHTS))
            for source in sources
        ]
        paths = state_groups(files[0])
        _check_copies(sources, files, paths)
        states = {path: join_groups([f[path] for f in files]) for path in paths}
    for rank in range(num_workers):
        origin = backups.Origin(rank, num_workers)

        def save(folder, origin=origin):
            shutil.copytree(sources[0], folder, dirs_exist_ok=True)
            with h5py.File(folder / backups.WEIGHTS, "r+") as file:
                for path, state in states.items():
                    for name, value in {**state, PLACE: np.array(origin)}.items():
                        del file[path][name]
                        file[path][name] = value

        backups.write(backups.worker_folder(out, rank), point, origin, save)
    return point


def _find(old: Path) -> tuple[list[Path], backups.Point]:
    """Returns the workers' folders and the newest point that all of them have."""
    found = sorted(old.glob("worker-*")) if old.is_dir() else []
    written = [folder for folder in found if backups.points_in(folder)]
    if not written:
        raise ValueError(
            "No backup found: expected folders worker-0/epoch-<n>, worker-1/..., as "
            f"tfgradcomp.callbacks.BackupAndRestore writes them. Received: {old}"
        )
    newest = backups.points_in(written[0])[-1]
    count = backups.read_origin(written[0], newest).num_workers
    folders = [backups.worker_folder(old, rank) for rank in range(count)]
    points = {folder.name: backups.points_in(folder) for folder in folders}
    common = set.intersection(*map(set, points.values()))
    if not common:
        have = {name: [*map(str, of_worker)] for name, of_worker in points.items()}
        raise ValueError(
            f"The backup is of {count} workers, which have no epoch in common. Put all "
            f"their folders into one directory. Received: backups by worker={have}"
        )
    equal = [point for point in common if _has_equal_weights(folders, point)]
    if not equal:
        raise ValueError(
            "The workers' weights differ: these backups are not of one training, or "
            "all of them lie between two exchanges of local steps. Expected: a backup "
            f"of an epoch's end. Received: {[*map(str, sorted(common))]} in {old}"
        )
    point = max(equal)
    origins = {f.name: tuple(backups.read_origin(f, point)) for f in folders}
    if [*origins.values()] != [(rank, count) for rank in range(count)]:
        raise ValueError(
            "The folders are mixed up: each must be of the worker in its name, and all "
            f"of {count} workers. Received: rank and number of workers by "
            f"folder={origins}"
        )
    return folders, point


def _has_equal_weights(folders, point):
    """Returns whether the trainable weights of all workers are equal, by their hash.

    Backups of version 0.1 have none.
    """
    paths = [backups.point_folder(folder, point) / backups.DIGEST for folder in folders]
    return len({path.read_text() for path in paths if path.exists()}) < 2


def _check_copies(
    sources: Sequence[Path], files: Sequence[h5py.File], paths: Sequence[str]
) -> None:
    """Checks that the workers' inner optimizers are equal, as their weights are.

    Other variables of a model may differ. Backups of version 0.1 have no hash of the
    trainable weights; for them all variables of the model are compared.
    """
    digests = [source / backups.DIGEST for source in sources]
    compared: tuple[str, ...] = ("",)
    if all(path.exists() for path in digests):
        compared = tuple(f"{path.rpartition('/')[0]}/" for path in paths)
    state = tuple(f"{path}/" for path in paths)

    def datasets_of(file):
        found = {}

        def visit(name, item):
            if isinstance(item, h5py.Dataset) and name.startswith(compared):
                if not name.startswith(state):
                    found[name] = item

        file.visititems(visit)
        return found

    def value(datasets, name):
        return datasets[name][()].tobytes() if name in datasets else None

    first = datasets_of(files[0])
    for file in files[1:]:
        other = datasets_of(file)
        for name in first.keys() | other.keys():
            if value(first, name) != value(other, name):
                raise _different(f"{name} in {file.filename}")


def _different(received: str) -> ValueError:
    return ValueError(
        "The workers' weights differ: these backups are not of one training. "
        f"Received: {received}"
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tfgradcomp.reshard",
        description="Convert the backups of N workers into those of M.",
    )
    parser.add_argument("old", help="directory of BackupAndRestore")
    parser.add_argument("--workers", type=int, required=True, help="new number")
    parser.add_argument("--out", required=True, help="directory to write")
    arguments = parser.parse_args(argv)
    try:
        point = reshard(arguments.old, arguments.workers, arguments.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{arguments.out}: {point} for {arguments.workers} workers")


if __name__ == "__main__":
    main()
