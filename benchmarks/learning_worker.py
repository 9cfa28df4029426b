"""One worker of `time_to_accuracy.py`: trains with Keras.

    TF_CONFIG=... python benchmarks/learning_worker.py FOLDER

Reads FOLDER/task.json (see `learning.py`) and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import tensorflow as tf
from learning import MOMENTUM, RATE, WIDTHS, Examples, train
from worker import make_strategy

import tfgradcomp

SGD = keras.optimizers.SGD


def sgd() -> keras.optimizers.Optimizer:
    """Returns what trains with float32, and what most methods are around."""
    return SGD(RATE, momentum=MOMENTUM)


WAYS = {
    "float32": sgd,
    "float16": lambda: tfgradcomp.HalfPrecision(sgd(), dtype="float16"),
    "TernGrad": lambda: tfgradcomp.TernGrad(sgd()),
    "Signum": lambda: tfgradcomp.Signum(SGD(1e-4)),
    "DistEFBlockSGDM": lambda: tfgradcomp.DistEFBlockSGDM(SGD(RATE)),
    "ORQ": lambda: tfgradcomp.ORQ(sgd()),
    "PowerSGD": lambda: tfgradcomp.PowerSGD(sgd(), rank=4),
    "LocalSteps": lambda: tfgradcomp.LocalSteps(
        sgd(), tfgradcomp.DistEFBlockSGDM(SGD(0.7)), every=16
    ),
}


def main(folder: Path) -> None:
    """Trains what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    rank = strategy.cluster_resolver.task_id
    number = strategy.num_replicas_in_sync
    examples = Examples(task, rank, number)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(task["seed"])
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu") for width in WIDTHS[1:-1]]
        last = keras.layers.Dense(WIDTHS[-1])
        model = keras.Sequential([keras.Input(WIDTHS[:1]), *layers, last])
        optimizer = WAYS[task["way"]]()
        variables = model.trainable_variables
        optimizer.build(variables)

    def update(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / number
        gradients = tape.gradient(value, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def count(x, y):
        right = tf.argmax(model(x), 1) == tf.cast(y, tf.int64)
        mine = tf.reduce_sum(tf.cast(right, tf.float32))
        return tf.distribute.get_replica_context().all_reduce("SUM", mine)

    def on_all(function):
        return tf.function(
            lambda x, y: strategy.run(function, args=(x, y)), autograph=False
        )

    step, hits = on_all(update), on_all(count)
    test = tf.constant(examples.test), tf.constant(examples.labels)
    answer = train(
        task,
        examples,
        lambda x, y: step(tf.constant(x), tf.constant(y)),
        lambda: float(hits(*test)),
    )
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
