"""State of compressed optimizers in HDF5 files, read without TensorFlow.

`tfgradcomp.engine.state` writes a group for each optimizer. The group contains the rank
of the worker and the number of workers (`place`), and each vector of the state as
float32 `[rows, size]`, named `<vector>.<role>.<name>`. Vectors with the role `worker`
have a row for each local replica and differ between workers. Vectors with the role
`server` may be divided over the files: `<vector>.server_owned`, int64 `[n, 2]`, has the
ranges of elements in the file, and all other elements are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import h5py
import numpy as np

PLACE = "place"
FALLBACK = "fallback"
# Leaves that are the same on all workers.
FACTORS = ".worker.update.left", ".worker.update.right"


def state_groups(file: h5py.File) -> list[str]:
    """Returns the paths of the groups that hold the state of a compressed optimizer."""
    groups: list[str] = []

    def visit(path, item):
        if isinstance(item, h5py.Group) and PLACE in item:
            groups.append(path)

    file.visititems(visit)
    return groups


def join_groups(groups: Sequence[h5py.Group]) -> dict[str, np.ndarray]:
    """Joins the states of all workers to a state for any number of workers.

    State that differs between workers, such as the residual, becomes its mean over all
    replicas. The parts of a server's state are joined.

    Args:
        groups: The group of one optimizer in the file of each worker, by ranks.

    Returns:
        The vectors `[1, size]` and the ranges of the server's elements, by their names.

    Raises:
        ValueError: If the groups are not those of all workers of one training.
    """
    _check_same_kind(groups)
    joined: dict[str, np.ndarray] = {}
    missing = []
    for name in groups[0]:
        if _role(name) == "worker":
            joined[name] = _mean([group[name] for group in groups])
            if name.endswith(FACTORS):
                _check_factors(name, groups)
        elif _role(name) == "server":
            joined[name], known = _joined_parts(name, groups)
            if not known.all():
                missing.append(f"elements {_ranges_of(~known).tolist()} of {name}")
            joined[_owned_name(name)] = np.array([[0, len(known)]], np.int64)
    if missing:
        places = [tuple(group[PLACE][()].tolist()) for group in groups]
        raise ValueError(
            "The server's state is not complete: each worker has saved a part of it, "
            "and some files are missing. Expected: the files of workers "
            f"{[*range(places[0][1])]}. Received: files of workers "
            f"{[rank for rank, _ in places]}, without {', '.join(missing)}"
        )
    return joined


def _ranges_of(mask: np.ndarray) -> np.ndarray:
    """Returns the ranges of true elements, int64 `[n, 2]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return edges.reshape([-1, 2]).astype(np.int64)


def _role(name: str) -> str:
    return name.split(".")[1] if name.count(".") > 1 else ""


def _owned_name(name: str) -> str:
    return f"{name.partition('.')[0]}.server_owned"


def _mean(datasets: Sequence[h5py.Dataset]) -> np.ndarray:
    total = sum(dataset[()].sum(0, np.float64, keepdims=True) for dataset in datasets)
    return (total / sum(len(dataset) for dataset in datasets)).astype(np.float32)


def _check_factors(name, groups):
    """Raises ValueError unless all workers have the same factors.

    The mean of products is not the product of means.
    """
    for group in groups:
        if (group[name][()] != groups[0][name][0]).any():
            raise ValueError(
                "The workers' residuals lack different updates, as if only some ran "
                "native operations: their mean cannot be taken. Train an epoch with "
                "native operations on all workers, or on none. "
                f"Received: another {name} in {group.file.filename}"
            )


def _joined_parts(name, groups):
    """Returns a vector of the server's state, and which of its elements are known."""
    size = groups[0][name].shape[1]
    value, known = np.zeros([1, size], np.float32), np.zeros([size], bool)
    for group in groups:
        for begin, end in group[_owned_name(name)][()]:
            value[:, begin:end] = group[name][:, begin:end]
            known[begin:end] = True
    return value, known


def _check_same_kind(groups):
    first = groups[0]
    for group in groups[1:]:
        if _description(group) != _description(first):
            raise ValueError(
                "The workers' optimizers differ: these backups are not of one "
                f"training. Received: {_description(first)} in {first.file.filename}, "
                f"{_description(group)} in {group.file.filename}"
            )


def _description(group):
    """Returns the vectors' names and sizes, and whether float32 replaced the method."""
    sizes = {name: item.shape[1:] for name, item in group.items() if _role(name)}
    return sizes, bool(group[FALLBACK][()])
