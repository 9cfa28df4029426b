"""Script of all roles: counts the bytes of the steps of both modes.

All processes are in a network of their own, so its interface sees nothing else.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import report

FEATURES, UNITS, WORKERS = 1000, 1000, 2
WARM, COUNTED = 3, 6


def received_bytes():
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise RuntimeError("there is no interface lo")


def make_model():
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(UNITS), keras.layers.Dense(1)]
    )


def batches(context):
    rng = np.random.default_rng(context.input_pipeline_id)
    x = rng.normal(size=(4, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()


class Count(keras.callbacks.Callback):
    """Counts the bytes of the steps after the first ones."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == WARM - 1:
            self.before = received_bytes()
        if batch == WARM + COUNTED - 1:
            self.counted = (received_bytes() - self.before) / COUNTED


def ours(mode):
    count = Count()
    trainer = tfgradcomp.ParameterServerTrainer(
        make_model,
        tfgradcomp.TernGrad(keras.optimizers.SGD(1e-4)),
        loss="mse",
        mode=mode,
    )
    trainer.fit(
        batches, steps_per_epoch=WARM + COUNTED + 2, callbacks=[count], verbose=0
    )
    return count.counted, trainer.traffic


def main(folder):
    sync, traffic = ours("sync")
    free, _ = ours("async")
    report(
        folder,
        0,
        {
            "sync": sync,
            # As many pushes as a round has.
            "async": free * WORKERS,
            "declared_up": 4 * traffic.words_sent,
            "declared_down": 4 * traffic.words_received,
            "elements": FEATURES * UNITS + 2 * UNITS + 1,
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
