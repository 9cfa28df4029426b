"""One worker of `embeddings.py`: steps on the rows of a table that a batch touches.

    TF_CONFIG=... python benchmarks/embeddings_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from cluster import interface_bytes
from worker import make_strategy

import tfgradcomp

RATE = 0.1
WARM_UP = 3


def terngrad(sparse):
    """Returns TernGrad whose slices travel as rows, or dense."""
    return tfgradcomp.TernGrad(
        keras.optimizers.SGD(RATE), transport="all_gather", sparse=sparse
    )


VARIANTS = {
    "TernGrad, rows": lambda: terngrad("rows"),
    "TernGrad, dense": lambda: terngrad("dense"),
    "TensorFlow, float32 rows": lambda: keras.optimizers.SGD(RATE),
}


def batches(task: dict, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the indices and values of a worker's gradient in each step."""
    rng = np.random.default_rng(rank)
    shape = (task["batch"] * task["length"],)
    return [
        (
            rng.integers(task["rows"], size=shape).astype(np.int32),
            rng.standard_normal((*shape, task["width"]), np.float32),
        )
        for _ in range(WARM_UP + task["steps"])
    ]


def measure(strategy, task: dict, name: str, rank: int) -> dict:
    """Returns the seconds and bytes of a step, and a digest of the table."""
    shape = [task["rows"], task["width"]]
    with strategy.scope():
        # The name that Keras' own layer gives it.
        table = keras.Variable(tf.zeros(shape), name="embeddings")
        optimizer = VARIANTS[name]()
        optimizer.build([table])
    one = tf.ones([1])

    @tf.function(autograph=False)
    def barrier():
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", one)
        )

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None, shape[1]]),
        ],
    )
    def step(indices, values):
        gradient = tf.IndexedSlices(values, indices, tf.constant(shape))
        strategy.run(lambda: optimizer.apply([gradient], [table]))

    data = batches(task, rank)
    for indices, values in data[:WARM_UP]:
        step(indices, values)
    barrier()
    before, begin = interface_bytes(task["interface"]), time.perf_counter()
    for indices, values in data[WARM_UP:]:
        step(indices, values)
    barrier()
    seconds, after = time.perf_counter() - begin, interface_bytes(task["interface"])
    digest = hashlib.sha256(np.asarray(table).tobytes()).hexdigest()
    steps = task["steps"]
    return {
        "seconds": seconds / steps,
        "sent": (after.sent - before.sent) / steps,
        "received": (after.received - before.received) / steps,
        "digest": digest,
    }


def main() -> None:
    """Runs the worker."""
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = make_strategy()
    rank = strategy.cluster_resolver.task_id
    answer = {name: measure(strategy, task, name, rank) for name in VARIANTS}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
