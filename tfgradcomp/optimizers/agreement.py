"""A check, made once, that all workers train the same model in the same state."""

from __future__ import annotations

import hashlib

import keras
import tensorflow as tf

from tfgradcomp.collectives import Collectives


def check_same_everywhere(
    hosts: Collectives,
    variables: list,
    settings: str,
    steps: keras.Variable,
    missing: list[str],
    is_state_partial: bool,
) -> None:
    """Compares the variables, the settings and the weights over the workers.

    Runs eagerly, also while a step is being traced, so that it comes before the first
    word of a gradient. All workers must call it; all raise, or none.

    Args:
        hosts: The collectives between the workers' processes.
        variables: The trainable variables: paths, shapes, types and values count.
        settings: What else must be equal.
        steps: The variable that counts steps.
        missing: What a restore of the optimizer's state has not found.
        is_state_partial: Whether the restored state is a part of the whole.

    Raises:
        ValueError: If the workers differ, or a worker misses some of its state.
    """
    lines = [f"{path_of(v)} {tuple(v.shape)} {v.dtype}" for v in variables]
    with tf.init_scope():
        taken = _local_value(steps)
        weights = b"".join(_local_value(v).tobytes() for v in variables)
        mine = [
            len(lines),
            _hash("\n".join(lines).encode()),
            _hash(settings.encode()),
            _hash(weights + taken.tobytes()),
            int(is_state_partial),
            len(missing),
        ]
        seen = hosts.gather(tf.constant(mine, tf.int64), "fingerprint").numpy()
    incomplete = [rank for rank, row in enumerate(seen) if row[5]]
    if incomplete:
        raise ValueError(
            f"The optimizer's state of workers {incomplete} is not restored whole. "
            f"{missing_state(missing)}"
        )
    different = [rank for rank, row in enumerate(seen) if (row != seen[0]).any()]
    if not different:
        return
    if (seen[:, :3] == seen[0, :3]).all():
        raise ValueError(
            f"The weights, the optimizer's state or the step count of workers "
            f"{different} differ from those of worker 0, though the models are the "
            "same. Expected: all restored from one moment, as "
            "tfgradcomp.callbacks.BackupAndRestore does it, or none. "
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


def _hash(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
