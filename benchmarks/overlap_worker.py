"""One worker of `overlap.py`: times steps with and without backward pass and exchange.

    TF_CONFIG=... python benchmarks/overlap_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf
from processes import timed
from start_up_worker import MODELS
from worker import make_strategy

import tfgradcomp

RATE = 1e-3
SGD = keras.optimizers.SGD
# Of the eight examples, so that the backward pass is longer than most exchanges.
COPIES = {"ResNet-50": (4, 1, 1, 1), "BERT-base": (1, 1)}


def make_optimizer(task: dict, carrier: str) -> keras.optimizers.Optimizer:
    """Returns stock SGD, or a method around it."""
    if task["method"] == "float32":
        return SGD(RATE)
    method = getattr(tfgradcomp, task["method"])
    return method(
        SGD(RATE),
        transport="sharded",
        carrier=carrier,
        bucket_bytes=task["bucket_mib"] * 2**20,
    )


class Steps:
    """The steps of one model, as functions without arguments.

    Args:
        task: What `overlap.py` asks for.
        strategy: Of all workers; the default one for a model that exchanges nothing.
        optimizer: Function that returns the model's optimizer.
        gradients: What `exchange` exchanges; default: the gradients of a step.
    """

    def __init__(
        self,
        task: dict,
        strategy: tf.distribute.Strategy,
        optimizer: Callable[[], keras.optimizers.Optimizer],
        gradients: list[tf.Tensor | tf.IndexedSlices] | None = None,
    ):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, x = MODELS[task["model"]]()
            self.optimizer = optimizer()
            variables = model.trainable_variables
            self.optimizer.build(variables)
        x = tf.tile(tf.constant(x, model.input.dtype), COPIES[task["model"]])
        y = tf.range(len(x)) % 10
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        number = strategy.num_replicas_in_sync

        def loss():
            return loss_of(y, model(x, training=True)) / number

        def gradients_of_loss():
            with tf.GradientTape() as tape:
                value = loss()
            return tape.gradient(value, variables)

        def train():
            self.optimizer.apply(gradients_of_loss(), variables)

        self.gradients = gradients or gradients_of_loss()

        def exchange():
            self.optimizer.apply(self.gradients, variables)

        def function(body):
            return tf.function(lambda: strategy.run(body), autograph=False)

        self.forward, self.train = function(loss), function(train)
        self.exchange = function(exchange)


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    alone = Steps(task, tf.distribute.get_strategy(), lambda: SGD(RATE))
    calls = {
        "forward": alone.forward,
        "alone": alone.train,
        "update": alone.exchange,
    }
    for carrier in task["carriers"]:
        make = functools.partial(make_optimizer, task, carrier)
        shared = Steps(task, strategy, make, alone.gradients)
        calls[f"exchange, {carrier}"] = shared.exchange
        calls[f"step, {carrier}"] = shared.train
    one = tf.ones([1])

    @tf.function(autograph=False)
    def barrier():
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", one)
        )

    seconds = {name: [] for name in calls}
    idle = {name: [] for name in calls}
    for round_ in range(-2, task["rounds"]):
        for name, call in calls.items():
            barrier()
            taken = timed(call)
            # The first round traces, and the second fills the caches.
            if round_ >= 0:
                seconds[name].append(taken[0])
                idle[name].append(taken[1])
    answer = {"seconds": seconds, "idle": idle}
    rank = strategy.cluster_resolver.task_id
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
