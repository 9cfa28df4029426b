"""Whether all workers train the same model, asked once."""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf

from tfgradcomp.seam.multi_worker_fit import across_hosts, is_multi_worker


def check_same_everywhere(variables: list[str], settings: str) -> None:
    """Compares a hash of the variables and the settings over the workers.

    Runs eagerly, also while a step is being traced, so that it comes before the first
    word of a gradient. All workers must call it; all raise, or none.

    Args:
        variables: One line a variable: path, shape, type.
        settings: What else must be equal.

    Raises:
        ValueError: If the workers differ.
    """
    strategy = tf.distribute.get_strategy()
    if not is_multi_worker(strategy):
        return
    hosts = across_hosts(strategy)
    mine = [len(variables), _hash("\n".join(variables)), _hash(settings)]
    with tf.init_scope():
        seen = hosts.gather(tf.constant(mine, tf.int64), "fingerprint").numpy()
    different = [
        rank for rank, row in enumerate(seen) if not np.array_equal(row, seen[0])
    ]
    if different:
        counts = {rank: int(row[0]) for rank, row in enumerate(seen)}
        what = "models" if (seen[:, :2] != seen[0, :2]).any() else "optimizer arguments"
        raise ValueError(
            f"The {what} of workers {different} differ from those of worker 0. "
            "Expected the same variables (paths, shapes, types, in the same order) and "
            "the same optimizer arguments on all workers: run one script everywhere, "
            "and create models in the same order, since Keras numbers layer names. "
            "Received: "
            f"number of variables by worker={counts}; this worker has {variables}, "
            f"{settings}"
        )


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
