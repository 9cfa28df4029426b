"""What `parameter_server.py` runs in all roles; the chief measures.

It prints `mark` where counters are to be read, waits for a line, and prints a row of
JSON for each way of training.
"""

from __future__ import annotations

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp

BATCH, WARM = 8, 2
METHODS = {
    "SignSGD": lambda: tfgradcomp.SignSGD(keras.optimizers.SGD(1e-9)),
    "TernGrad": lambda: tfgradcomp.TernGrad(keras.optimizers.SGD(1e-6)),
    "DistEFBlockSGDM": lambda: tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(1e-6)),
}


def make_model(units: int):
    """Returns a model of `units` squared weights, and a few more."""
    return keras.Sequential(
        [keras.Input((units,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    )


def batches(units: int, context) -> tf.data.Dataset:
    """Returns a worker's dataset: one batch, again and again."""
    rng = np.random.default_rng(context.input_pipeline_id)
    x = rng.normal(size=(BATCH, units)).astype(np.float32)
    return tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()


def mark() -> float:
    """Lets the counters be read; returns the time."""
    print("mark", flush=True)
    sys.stdin.readline()
    return time.perf_counter()


class Clock(keras.callbacks.Callback):
    """Measures the steps after the first few."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        """Marks the beginning and the end."""
        if batch == WARM - 1:
            self.began = mark()
        elif batch == WARM + self.steps - 1:
            self.seconds = time.perf_counter() - self.began
            mark()


def ours(method: str, mode: str, units: int, steps: int) -> float:
    """Returns the seconds of some steps; in mode "sync" of all workers together."""
    clock = Clock(steps)
    trainer = tfgradcomp.ParameterServerTrainer(
        lambda: make_model(units),
        METHODS[method](),
        loss="mse",
        mode=mode,
    )
    trainer.fit(
        lambda context: batches(units, context),
        steps_per_epoch=WARM + steps,
        callbacks=[clock],
        verbose=0,
    )
    return clock.seconds


def stock(units: int, steps: int) -> float:
    """Returns the seconds of some steps of TensorFlow's own strategy, float32."""
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = make_model(units)
        optimizer = keras.optimizers.SGD(1e-6)
        optimizer.build(model.trainable_variables)

    def on_replica(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x[:, :1]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    @tf.function
    def step():
        strategy.run(on_replica, args=(tf.random.normal([BATCH, units]),))

    def take(count):
        for _ in range(count):
            coordinator.schedule(step)
        coordinator.join()

    take(2 * WARM)
    began = mark()
    take(steps)
    seconds = time.perf_counter() - began
    mark()
    return seconds


def main(units: int, workers: int, rounds: int) -> None:
    """Measures all, or serves."""
    steps = workers * rounds
    # What the constructor does for workers and servers comes first: they stay there.
    for method in METHODS:
        row(method, "sync", steps, ours(method, "sync", units, rounds))
        row(method, "async", steps, ours(method, "async", units, steps))
    row("float32", "async", steps, stock(units, steps))


def row(gradients: str, mode: str, steps: int, seconds: float) -> None:
    """Prints what was measured: each step is one batch of one worker."""
    values = {"gradients": gradients, "mode": mode, "steps": steps, "seconds": seconds}
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
