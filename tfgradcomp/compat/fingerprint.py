"""Whether all workers train the same model, asked once."""

from __future__ import annotations

import hashlib

import keras
import tensorflow as tf

from tfgradcomp.compat.workers import across_hosts, is_multi_worker


def check_same_everywhere(variables: list, settings: str, steps) -> None:
    """Compares the variables, the settings and the weights over the workers.

    Runs eagerly, also while a step is being traced, so that it comes before the first
    word of a gradient. All workers must call it; all raise, or none.

    Args:
        variables: The trainable variables: paths, shapes, types and values count.
        settings: What else must be equal.
        steps: The variable that counts steps.

    Raises:
        ValueError: If the workers differ.
    """
    strategy = tf.distribute.get_strategy()
    if not is_multi_worker(strategy):
        return
    hosts = across_hosts(strategy)
    lines = [f"{path_of(v)} {tuple(v.shape)} {v.dtype}" for v in variables]
    with tf.init_scope():
        taken = _local_value(steps)
        weights = b"".join(_local_value(v).tobytes() for v in variables)
        mine = [
            len(lines),
            _hash("\n".join(lines).encode()),
            _hash(settings.encode()),
            _hash(weights + taken.tobytes()),
        ]
        seen = hosts.gather(tf.constant(mine, tf.int64), "fingerprint").numpy()
    different = [rank for rank, row in enumerate(seen) if (row != seen[0]).any()]
    if not different:
        return
    if (seen[:, :3] == seen[0, :3]).all():
        raise ValueError(
            f"The weights or the step count of workers {different} differ from those "
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


def path_of(variable) -> str:
    """Returns the path of a Keras variable, the name of a TensorFlow one."""
    return getattr(variable, "path", variable.name)


def _local_value(variable):
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return tf.distribute.get_strategy().experimental_local_results(value)[0].numpy()


def _hash(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
