"""Comparison of the workers: before the first step, and while they train."""

from __future__ import annotations

import re
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives, Hosts
from tfgradcomp.collectives.comparison import compare
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.optimizer_step import accumulated_gradients
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
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


def check_same_at_start(
    hosts: Hosts, inner: keras.optimizers.Optimizer, settings: dict
) -> None:
    """Compares the variables, the settings and the weights over the workers.

    Runs eagerly, also while a step is being traced, so that it comes before the first
    word of a gradient. All workers must call it; all raise, or none.

    Args:
        hosts: The collectives between the workers' processes.
        inner: The inner optimizer: its configuration, its steps, and the variables
            that it trains count, with their paths, shapes, types and values.
        settings: What else must be equal, by names. The address of an object, which
            is another one in each process, does not count.

    Raises:
        ValueError: If the workers differ.
    """
    variables = compat.trainable_variables(inner)
    settings = {"inner_optimizer": describe(inner), **settings}
    lines = [f"{path_of(v)} {tuple(v.shape)} {v.dtype}" for v in variables]
    words = {k: re.sub(" at 0x[0-9a-fA-F]+", "", str(v)) for k, v in settings.items()}
    with tf.init_scope():
        hosts.watch()
        taken = _local_values(compat.step_counter(inner))[0]
        weights = b"".join(_local_values(v)[0].tobytes() for v in variables)
        mine = [
            len(lines),
            digest64("\n".join(lines).encode()),
            digest64(weights + taken.tobytes()),
            *(digest64(text.encode()) for text in words.values()),
        ]
        call_site = f"fingerprint/{len(mine)}"
        seen = hosts.gather(tf.constant(mine, tf.int64), call_site).numpy()
    differs = seen != seen[0]
    workers = np.flatnonzero(differs.any(1)).tolist()
    names = [
        k for k, is_other in zip(words, differs[:, 3:].any(0), strict=True) if is_other
    ]
    if differs[:, :2].any():
        counts = dict(enumerate(seen[:, 0].tolist()))
        raise ValueError(
            f"The models of workers {workers} differ from those of worker 0. Expected "
            "the same variables (paths, shapes, types, in the same order) on all "
            "workers: run one script everywhere, and create models in the same order, "
            "since Keras numbers layer names. Received: number of variables by "
            f"worker={counts}; this worker has {lines}"
        )
    if names:
        raise ValueError(
            f"The optimizer arguments of workers {workers} differ from those of worker "
            "0. Expected: the same on all workers. Received: "
            + ", ".join(f"{name}={words[name]}" for name in names)
            + " on this worker"
        )
    if workers:
        raise ValueError(
            f"The weights or the step counts of workers {workers} differ from those "
            "of worker 0, though the models are the same. Expected: all restored from "
            "one moment, as tfgradcomp.callbacks.BackupAndRestore does it, or none. "
            f"Received: steps={int(taken)} on this worker"
        )


def check_still_same(
    hosts: Collectives | None, inner: keras.optimizers.Optimizer, shared: list
) -> None:
    """Compares what must be equal on all replicas of all workers.

    All workers must call it, outside of a graph.

    Args:
        hosts: The collectives between the workers' processes; None where there is one.
        inner: The inner optimizer, whose weights and state are equal.
        shared: Variables that must be equal as well.

    Raises:
        RuntimeError: On all workers, if any differ.
    """
    variables = [*_shared_variables(inner), *shared]
    is_other = compare([_local_values(variable) for variable in variables], hosts)
    found = np.flatnonzero(is_other.any(0)).tolist()
    if not found:
        return
    paths = [path_of(variables[i]) for i in found]
    workers = np.flatnonzero(is_other[:, found[0]]).tolist()
    steps = int(_local_values(compat.step_counter(inner))[0])
    raise RuntimeError(
        f"{paths[0]} of workers {workers} is no longer what the others have. Expected: "
        "equal weights, learning rates and shared state on all workers. A flipped bit, "
        "another library on one of them, or code that sets a variable on one worker "
        "only makes them differ; go back to the last backup. Received: "
        f"steps={steps}, {len(paths)} variables that differ, first {paths[:5]}"
    )


def describe(optimizer: keras.optimizers.Optimizer) -> str:
    """Returns the configuration of an optimizer, without its name."""
    try:
        config = optimizer.get_config()
    except NotImplementedError:
        config = {}
    settings = {key: value for key, value in config.items() if key != "name"}
    return f"{type(optimizer).__name__}({settings})"


def _shared_variables(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns weights and state that are the same on all workers.

    Accumulated gradients are left out: each worker has its own.
    """
    own = {id(variable) for variable in accumulated_gradients(optimizer)}
    state = [v for v in optimizer.variables if id(v) not in own]
    return [*state, *compat.trainable_variables(optimizer)]


def missing_state(missing: list[str]) -> str:
    """Returns the sentences of an error about state that a restore has not found."""
    return (
        "Expected: a file of the same method, policy and variables for every worker, "
        "of whatever transport, number of workers or buckets; a server's state that "
        "was spread over workers needs the files of all of them "
        "(tfgradcomp.callbacks.BackupAndRestore keeps them; `python -m "
        "tfgradcomp.reshard` joins them). To use the weights alone, load them into a "
        "model that is not compiled, and compile it afterwards. "
        f"Received: missing on this worker={missing}"
    )


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Returns the path of a Keras variable, the name of a TensorFlow one."""
    return getattr(variable, "path", variable.name)


def _local_values(variable: keras.Variable | tf.Variable) -> list[np.ndarray]:
    """Returns the values on the replicas of this process."""
    if isinstance(variable, PerReplicaVariable):
        return [*variable.local_values()]
    value = variable.value if isinstance(variable, keras.Variable) else variable
    locals_ = tf.distribute.get_strategy().experimental_local_results(value)
    return [value.numpy() for value in locals_]
