"""Comparison of the workers: before the first step, and while they train."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives, Hosts
from tfgradcomp.collectives.comparison import compare
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.optimizer_step import accumulated_gradients
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core.digest import digest64


def check_restored(
    processes: Collectives,
    owner: str,
    missing: list[str],
    is_partial: bool,
    origin: tuple[int, int],
) -> tuple[list[tuple[int, int]], bool]:
    """Compares the restored states of all processes, which all must call it.

    Runs eagerly, also while a step is being traced. All processes raise, or none.

    Args:
        processes: The collectives between the processes.
        owner: Name of the optimizer.
        missing: Parts of the state that this process' file lacks, or has in excess.
        is_partial: Whether the file has only a part of the server's state.
        origin: The rank of the process that wrote the file, and the number of
            processes; (-1, 0) where nothing was restored.

    Returns:
        The origin of each process' file, and whether any file has only a part of the
        server's state, so that all processes must join their parts.

    Raises:
        ValueError: If a process misses some of its state, or if a process has restored
            a part and another process nothing.
    """
    mine = [len(missing), int(is_partial), *origin]
    with tf.init_scope():
        seen = processes.gather(tf.constant(mine, tf.int64), "restore/status").numpy()
    incomplete = [rank for rank, row in enumerate(seen) if row[0]]
    if incomplete:
        raise ValueError(
            f"The state of {owner} is not restored as a whole on workers {incomplete}. "
            f"{missing_state(missing)}"
        )
    partial = [rank for rank, row in enumerate(seen) if row[1]]
    nothing = [rank for rank, row in enumerate(seen) if not row[3]]
    if partial and nothing:
        raise ValueError(
            f"Workers {partial} have restored a part of the state of {owner}'s "
            f"server, workers {nothing} nothing. {missing_state([])}"
        )
    return [(int(rank), int(count)) for *_, rank, count in seen], bool(partial)


def lost_files(origins: list[tuple[int, int]]) -> str:
    """Returns a sentence about missing files, by the origins of the restored files."""
    ranks = [rank for rank, _ in origins]
    count = max(count for _, count in origins)
    lost = sorted({*range(count)} - {*ranks})
    return (
        f"The files that were restored are those of workers {ranks} of {count}; "
        f"missing are those of workers {lost}."
    )


def check_same_at_start(
    hosts: Hosts, inner: keras.optimizers.Optimizer, plan: str = ""
) -> None:
    """Compares variables, plans and weights of the workers before the first step.

    Runs eagerly, also while a step is being traced. All workers must call it.

    Args:
        hosts: The collectives between the workers' processes.
        inner: The inner optimizer. Its steps and the variables that it trains must be
            equal: paths, shapes, types and values.
        plan: The plan, in words, which must be equal as well. Rules that are functions
            show in it, and not in the settings.

    Raises:
        ValueError: On all workers, if the workers differ.
    """
    variables = compat.trainable_variables(inner)
    lines = [f"{path_of(v)} {tuple(v.shape)} {v.dtype}" for v in variables]
    with tf.init_scope():
        taken = _local_values(compat.step_counter(inner))[0]
        weights = [digest64(_local_values(v)[0]) for v in variables]
        mine = [
            len(lines),
            digest64("\n".join(lines).encode()),
            digest64(plan.encode()),
            digest64(np.array([*weights, taken], np.int64)),
        ]
        seen = hosts.gather(tf.constant(mine, tf.int64), "fingerprint").numpy()
    differs = seen != seen[0]
    workers = np.flatnonzero(differs.any(1)).tolist()
    if differs[:, :2].any():
        counts = dict(enumerate(seen[:, 0].tolist()))
        raise ValueError(
            f"The models of workers {workers} differ from those of worker 0. Expected "
            "the same variables (paths, shapes, types, in the same order) on all "
            "workers: run one script everywhere, and create models in the same order, "
            "since Keras numbers layer names. Received: number of variables by "
            f"worker={counts}; this worker has {lines}"
        )
    if differs[:, 2].any():
        raise ValueError(
            f"Variables travel otherwise on workers {workers} than on worker 0. "
            "Expected: functions in `policy`, `exclude` or `sparse` that choose the "
            f"same on all workers. Received: plan={plan} on this worker"
        )
    if workers:
        raise ValueError(
            f"The weights or the step counts of workers {workers} differ from those "
            "of worker 0, though the models are the same. Expected: all restored from "
            "one step, as by tfgradcomp.callbacks.BackupAndRestore, or none. "
            f"Received: steps={int(taken)} on this worker"
        )


def check_same_gradients(
    hosts: Hosts, inner: keras.optimizers.Optimizer, positions: Collection[int]
) -> None:
    """Compares which variables have a gradient in the steps that are being traced.

    Runs eagerly. All workers must call it.

    Args:
        hosts: The collectives between the workers' processes.
        inner: The inner optimizer.
        positions: The variables of this worker that have a gradient.

    Raises:
        ValueError: On all workers, if a variable has a gradient on some of them only.
    """
    variables = compat.trainable_variables(inner)
    mine = [int(position in positions) for position in range(len(variables))]
    with tf.init_scope():
        call_site = f"gradients/{len(mine)}"
        seen = hosts.gather(tf.constant(mine, tf.int32), call_site).numpy()
    if (seen == seen[0]).all():
        return
    paths, workers = _differing(variables, seen)
    raise ValueError(
        f"{paths[0]} has a gradient on workers {workers} and none on the others. "
        "Expected: the same variables with a gradient on all workers: freeze the same "
        "layers, and pass the same variables to `apply`. "
        f"Received: variables that differ={paths[:5]}"
    )


def check_same_frozen(hosts: Hosts, variables: Sequence[keras.Variable]) -> None:
    """Compares which weights are frozen; all workers must call it.

    Models with other numbers of weights are compared before the first step.

    Args:
        hosts: The collectives between the workers' processes.
        variables: The trained variables of a model, frozen or not.

    Raises:
        ValueError: On all workers, if a weight is frozen on some of them only.
    """
    mine = np.array([not variable.trainable for variable in variables], np.int32)
    key = [len(mine), digest64(mine)]
    seen = hosts.gather(tf.constant(key, tf.int64), "fit/frozen").numpy()
    if (seen[:, 0] != len(mine)).any() or (seen == seen[0]).all():
        return
    seen = hosts.gather(tf.constant(mine), f"fit/frozen/{len(mine)}").numpy()
    paths, workers = _differing(variables, seen)
    raise ValueError(
        f"{paths[0]} is frozen on workers {workers} and trained on the others. "
        "Expected: the same layers with trainable=False on all workers. "
        f"Received: weights that differ={paths[:5]}"
    )


def _differing(variables, seen):
    """Returns the paths whose entries of `seen`, `[N, size]`, differ between workers.

    The workers with a 1 for the first of them follow.
    """
    differing = np.flatnonzero((seen != seen[0]).any(0)).tolist()
    paths = [path_of(variables[position]) for position in differing]
    return paths, np.flatnonzero(seen[:, differing[0]]).tolist()


def check_still_same(
    hosts: Collectives | None, inner: keras.optimizers.Optimizer, shared: list
) -> None:
    """Compares weights and shared state of all replicas of all workers.

    All workers must call it, outside of a graph.

    Args:
        hosts: The collectives between the workers' processes; None where there is one.
        inner: The inner optimizer, whose weights and state must be equal.
        shared: Further variables that must be equal.

    Raises:
        RuntimeError: On all workers, if any variables differ.
    """
    variables = [*_shared_variables(inner), *shared]
    is_other = compare(map(_local_values, variables), hosts)
    found = np.flatnonzero(is_other.any(0)).tolist()
    if not found:
        return
    paths = [path_of(variables[i]) for i in found]
    workers = np.flatnonzero(is_other[:, found[0]]).tolist()
    steps = int(_local_values(compat.step_counter(inner))[0])
    raise RuntimeError(
        f"{paths[0]} of workers {workers} differs from the other workers'. Expected: "
        "equal weights, learning rates and shared state on all workers. Possible "
        "reasons: a flipped bit, different libraries, or code that sets a variable on "
        "one worker only. Go back to the last backup. Received: "
        f"steps={steps}, {len(paths)} variables that differ, first {paths[:5]}"
    )


def _shared_variables(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns weights and state, without the gradients that a worker accumulates."""
    own = {id(variable) for variable in accumulated_gradients(optimizer)}
    state = [v for v in optimizer.variables if id(v) not in own]
    return [*state, *compat.trainable_variables(optimizer)]


def missing_state(missing: list[str]) -> str:
    """Returns the sentences of an error about a state that is not complete."""
    return (
        "Expected: a file of the same method, policy and variables for every worker; "
        "transport, number of workers and buckets may differ. A server's state that "
        "was spread over workers needs the files of all of them "
        "(tfgradcomp.callbacks.BackupAndRestore keeps them; `python -m "
        "tfgradcomp.reshard` joins them). To use the weights alone, load them into a "
        "model that is not compiled, and compile it afterwards. "
        f"Received: missing on this worker={missing}"
    )


def check_holds_local_steps(owner: str, store: Any, names: Sequence[str]) -> None:
    """Raises ValueError if a file lacks a part of the state."""
    missing = [name for name in names if name not in store]
    if missing:
        raise ValueError(
            f"The file holds no state of {owner}. Expected: one that was saved with "
            "LocalSteps and the same model; to use the weights alone, load them into a "
            "model that is not compiled, and compile it afterwards. "
            f"Received: missing={missing}"
        )


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Returns the path of a Keras variable, the name of a TensorFlow one."""
    return getattr(variable, "path", variable.name)


def _local_values(variable: keras.Variable | tf.Variable) -> list[np.ndarray]:
    """Returns the values on the replicas of this process."""
    if isinstance(variable, PerReplicaVariable):
        return [*variable.local_values()]
    value = compat.tensorflow_variable(variable)
    locals_ = tf.distribute.get_strategy().experimental_local_results(value)
    return [value.numpy() for value in locals_]
