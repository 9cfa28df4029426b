"""One worker of `local_steps.py`: times training steps, way by way.

    TF_CONFIG=... python benchmarks/local_steps_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from worker import make_strategy

import tfgradcomp

FEATURES, CLASSES = 784, 10


def make_optimizer(way: str, every: int, delay: int) -> keras.optimizers.Optimizer:
    """Returns Adam, with local steps around it where they are asked for."""
    adam = keras.optimizers.Adam(1e-4)
    if not way.startswith("LocalSteps"):
        return adam
    outer = tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.7), transport="sharded")
    return tfgradcomp.LocalSteps(
        adam,
        outer,
        every,
        stagger="stagger" in way,
        delay=delay if "delay" in way else 0,
    )


class Way:
    """A model and the step that trains it.

    Args:
        name: Of the way.
        strategy: Of all workers.
        task: What `local_steps.py` asks for.
    """

    def __init__(self, name: str, strategy: tf.distribute.Strategy, task: dict):
        rng = np.random.default_rng(strategy.cluster_resolver.task_id)
        size = task["batch_size"]
        x = tf.constant(rng.normal(size=[size, FEATURES]), tf.float32)
        y = tf.constant(rng.integers(0, CLASSES, size))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        is_alone = name == "nothing exchanged"
        if is_alone:
            # Its variables are this worker's alone.
            strategy = tf.distribute.get_strategy()
        with strategy.scope():
            layers = [keras.layers.Dense(n, "relu") for n in (2560, 2560, 512)]
            model = keras.Sequential(
                [keras.Input([FEATURES]), *layers, keras.layers.Dense(CLASSES)]
            )
            optimizer = make_optimizer(name, task["every"], task["delay"])
            variables = model.trainable_variables
            optimizer.build(variables)
        number = strategy.num_replicas_in_sync

        def train():
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True)) / number
            optimizer.apply_gradients(
                zip(tape.gradient(value, variables), variables, strict=True)
            )

        self.step = tf.function(
            train if is_alone else lambda: strategy.run(train), autograph=False
        )
        self.parameters = model.count_params()
        self.declared = 0.0 if is_alone else 8 * (number - 1) / number * self.parameters
        if hasattr(optimizer, "traffic"):
            self.declared = optimizer.traffic.bytes_received


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    ways = {name: Way(name, strategy, task) for name in task["ways"]}
    one = tf.ones([1])

    @tf.function(autograph=False)
    def barrier():
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", one)
        )

    seconds = {name: [] for name in ways}
    for number, (name, way) in itertools.product(
        range(1 + task["rounds"]), ways.items()
    ):
        steps = 1 if name == "float32" else task["every"]
        barrier()
        began = time.perf_counter()
        for _ in range(steps):
            way.step()
        taken = (time.perf_counter() - began) / steps
        # The first round traces.
        if number:
            seconds[name].append(taken)
    answer = {
        "seconds": seconds,
        "declared": {name: way.declared for name, way in ways.items()},
        "parameters": ways[task["ways"][0]].parameters,
    }
    rank = strategy.cluster_resolver.task_id
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
