"""One worker of `start_up.py`: times `fit` until its first step has ended.

    python benchmarks/start_up_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from worker import make_strategy

import tfgradcomp

WORDS, LENGTH, WIDTH = 30_522, 16, 768
ROUNDS = 4


def lenet():
    """Returns a LeNet and the shape of its input."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(20, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(50, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(500, "relu"),
            layers.Dense(10),
        ]
    )
    return model, np.random.default_rng(0).normal(size=[8, 28, 28, 1])


def resnet_50():
    """Returns Keras' ResNet-50, with small images."""
    model = keras.applications.ResNet50(
        weights=None,
        input_shape=(64, 64, 3),
        classes=10,
        classifier_activation=None,
    )
    return model, np.random.default_rng(0).normal(size=[8, 64, 64, 3])


def bert_base():
    """Returns an encoder of BERT-base's size, with short texts."""
    layers = keras.layers
    words = keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(12):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(12, 64)(x, x))
        inner = layers.Dense(4 * WIDTH, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(inner))
    model = keras.Model(words, layers.Dense(10)(x[:, 0]))
    return model, np.random.default_rng(0).integers(0, WORDS, [8, LENGTH])


MODELS = {"LeNet": lenet, "ResNet-50": resnet_50, "BERT-base": bert_base}


class Clock(keras.callbacks.Callback):
    """Notes when steps end."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self.ends.append(time.perf_counter())


def make_optimizer(way: str) -> keras.optimizers.Optimizer:
    """Returns SGD, with a wrapper and a transport around it where one is named."""
    sgd = keras.optimizers.SGD(1e-3)
    if way == "stock":
        return sgd
    name, transport = way.split()
    return getattr(tfgradcomp, name)(sgd, transport=transport)


def data_of(x: np.ndarray) -> tf.data.Dataset:
    """Returns the same batch, again and again."""
    return tf.data.Dataset.from_tensor_slices((x, np.arange(8))).repeat().batch(8)


def loss() -> keras.losses.Loss:
    """Returns what all models are trained with."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def with_servers(task: dict) -> list[float]:
    """Returns the chief's seconds from `fit` to the end of each round.

    Workers and servers stay here.
    """
    _, x = MODELS[task["model"]]()
    trainer = tfgradcomp.ParameterServerTrainer(
        lambda: MODELS[task["model"]]()[0], make_optimizer(task["way"]), loss()
    )
    clock = Clock()
    began = time.perf_counter()
    trainer.fit(
        lambda context: data_of(x), steps_per_epoch=ROUNDS, verbose=0, callbacks=[clock]
    )
    return [end - began for end in clock.ends]


def stock_with_servers(task: dict) -> list[float]:
    """Returns the same of TensorFlow's own strategy, as many steps a round as workers.

    Keras' `fit` does not know the strategy.
    """
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type != "chief":
        tf.distribute.Server(
            cluster.cluster_spec(), cluster.task_type, cluster.task_id
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, x = MODELS[task["model"]]()
        optimizer, loss_of = keras.optimizers.SGD(1e-3), loss()
        optimizer.build(model.trainable_variables)
    began = time.perf_counter()

    def on_worker(batch):
        inputs, labels = batch
        with tf.GradientTape() as tape:
            value = loss_of(labels, model(inputs, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    @tf.function(autograph=False)
    def step(iterator):
        strategy.run(on_worker, args=(next(iterator),))

    batches = iter(coordinator.create_per_worker_dataset(lambda: data_of(x)))
    ends = []
    for _ in range(ROUNDS):
        for _ in cluster.cluster_spec().job_tasks("worker"):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        ends.append(time.perf_counter() - began)
    return ends


def on_workers(task: dict) -> list[float]:
    """Returns the seconds from `fit` to the end of each step, without servers."""
    strategy = tf.distribute.get_strategy()
    if "TF_CONFIG" in os.environ:
        strategy = make_strategy()
    # Keras' own `fit` knows nothing of several processes.
    tfgradcomp.enable_multi_worker_fit()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, x = MODELS[task["model"]]()
        model.compile(make_optimizer(task["way"]), loss())
    data, clock = data_of(x), Clock()
    began = time.perf_counter()
    model.fit(data, steps_per_epoch=ROUNDS, verbose=0, callbacks=[clock])
    return [end - began for end in clock.ends]


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    if not task["servers"]:
        ends = on_workers(task)
    elif task["way"] == "stock":
        ends = stock_with_servers(task)
    else:
        ends = with_servers(task)
    answer = {"first": ends[0], "step": ends[-1] - ends[-2]}
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    rank = 0 if task["servers"] else cluster.task_id or 0
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
