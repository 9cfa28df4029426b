"""Comparison of the workers before the first step: one model, one state."""

from __future__ import annotations

import re
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgradcomp.collectives import Collectives
from tfgradcomp.core.digest import digest64


class RestoreStatus(NamedTuple):
    """Result of a restore on one process.

    Attributes:
        missing: Parts of the state that the file lacks, or that have no place here.
        is_partial: True if the file has only a part of the server's state.
        origin: The rank of the process that wrote the file, and their number; (-1, 0)
            where nothing was restored.
    """

    missing: list[str]
    is_partial: bool = False
    origin: tuple[int, int] = (-1, 0)


def check_restored(
    processes: Collectives, owner: str, status: RestoreStatus
) -> tuple[list[tuple[int, int]], bool]:
    """Compares what all processes have restored; all raise, or none.

    All processes must call it. Runs eagerly, also while a step is being traced.

    Args:
        processes: The collectives between the processes.
        owner: Name of the optimizer.
        status: What this process has restored.

    Returns:
        The origins of the files, by processes, and whether one has only a part of the
        server's state, so that all must join theirs.

    Raises:
        ValueError: If a process misses some of its state, or if one has restored a part
            and another one nothing.
    """
    mine = [len(status.missing), int(status.is_partial), *status.origin]
    with tf.init_scope():
        seen = processes.gather(tf.constant(mine, tf.int64), "restore/status").numpy()
    incomplete = [rank for rank, row in enumerate(seen) if row[0]]
    if incomplete:
        raise ValueError(
            f"The state of {owner} is not restored as a whole on workers {incomplete}. "
            f"{missing_state(status.missing)}"
        )
    partial = [rank for rank, row in enumerate(seen) if row[1]]
    nothing = [rank for rank, row in enumerate(seen) if not row[3]]
    if partial and nothing:
        raise ValueError(
            f"Workers {partial} have restored a part of the state of {owner}'s "
            f"server, workers {nothing} nothing. {missing_state([])}"
        )
    return [(int(row[2]), int(row[3])) for row in seen], bool(partial)


def lost_files(origins: list[tuple[int, int]]) -> str:
    """Returns a sentence about the files that a complete set would have besides.

    Args:
        origins: The rank that wrote each restored file, and the number of ranks.
    """
    ranks = [rank for rank, _ in origins]
    count = max(count for _, count in origins)
    lost = sorted({*range(count)} - {*ranks})
    return (
        f"The files that were restored are those of workers {ranks} of {count}; "
        f"missing are those of workers {lost}."
    )


def check_same_everywhere(
    hosts: Collectives, variables: list, settings: str, steps: keras.Variable
) -> None:
    """Compares the variables, the settings and the weights over the workers.

    Runs eagerly, also while a step is being traced, so that it comes before the first
    word of a gradient. All workers must call it; all raise, or none.

    Args:
        hosts: The collectives between the workers' processes.
        variables: The trainable variables: paths, shapes, types and values count.
        settings: What else must be equal, in words. The address of an object, which
            is another one in each process, does not count.
        steps: The variable that counts steps.

    Raises:
        ValueError: If the workers differ.
    """
    lines = [f"{path_of(v)} {tuple(v.shape)} {v.dtype}" for v in variables]
    settings = re.sub(" at 0x[0-9a-fA-F]+", "", settings)
    with tf.init_scope():
        taken = _local_value(steps)
        weights = b"".join(_local_value(v).tobytes() for v in variables)
        mine = [
            len(lines),
            digest64("\n".join(lines).encode()),
            digest64(settings.encode()),
            digest64(weights + taken.tobytes()),
        ]
        seen = hosts.gather(tf.constant(mine, tf.int64), "fingerprint").numpy()
    different = [rank for rank, row in enumerate(seen) if (row != seen[0]).any()]
    if not different:
        return
    if (seen[:, :3] == seen[0, :3]).all():
        raise ValueError(
            f"The weights or the step counts of workers {different} differ from those "
            "of worker 0, though the models are the same. Expected: all restored from "
            "one moment, as tfgradcomp.callbacks.BackupAndRestore does it, or none. "
            f"Received: steps={int(taken)} on this worker"
        )
    counts = {rank: int(row[0]) for rank, row in enumerate(seen)}
    what = "models" if (seen[:, :2] != seen[0, :2]).any() else "optimizer arguments"
    raise ValueError(
        f"The {what} of workers {different} differ from those of worker 0. Expected "
        "the same variables (paths, shapes, types, in the same order) and the same "
        "optimizer arguments on all workers: run one script everywhere, and create "
        "models in the same order, since Keras numbers layer names. Received: "
        f"number of variables by worker={counts}; this worker has {lines}, {settings}"
    )


def missing_state(missing: list[str]) -> str:
    """Returns the sentences of an error about state that a restore has not found."""
    return (
        "Expected: a file of the same method and variables for every worker, of "
        "whatever transport, number of workers or buckets; a server's state that was "
        "spread over workers needs the files of all of them "
        "(tfgradcomp.callbacks.BackupAndRestore keeps them; `python -m "
        "tfgradcomp.reshard` joins them). To use the weights alone, load them into a "
        "model that is not compiled, and compile it afterwards. "
        f"Received: missing on this worker={missing}"
    )


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Returns the path of a Keras variable, the name of a TensorFlow one."""
    return getattr(variable, "path", variable.name)


def _local_value(variable):
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return tf.distribute.get_strategy().experimental_local_results(value)[0].numpy()
