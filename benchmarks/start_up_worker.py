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


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    rank, strategy = 0, tf.distribute.get_strategy()
    if "TF_CONFIG" in os.environ:
        strategy = make_strategy()
        rank = strategy.cluster_resolver.task_id
    # Keras' own `fit` knows nothing of several processes.
    tfgradcomp.enable_multi_worker_fit()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, x = MODELS[task["model"]]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make_optimizer(task["way"]), loss)
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(8)))
    data = data.repeat().batch(8)
    clock = Clock()
    began = time.perf_counter()
    model.fit(data, steps_per_epoch=4, verbose=0, callbacks=[clock])
    first, *_, last_but_one, last = [end - began for end in clock.ends]
    answer = {"first": first, "step": last - last_but_one}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
