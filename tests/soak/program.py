"""A small training of many steps, with collectives or with parameter servers.

As a script it is one process of a cluster that the launcher has started:
`program.py (collectives | sync | async) steps`.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank

FEATURES, BATCH = 32, 4
# Epochs, at whose ends workers are compared and evaluation runs.
EPOCHS = 20


def make_model():
    """A layer that is compressed, and one that is too small for it."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )


def make_optimizer():
    """Residuals of workers and servers, momenta, a state for each."""
    return tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(1e-3), min_size=100)


def dataset(seed):
    """Endless batches."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, FEATURES)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x.mean(1, keepdims=True)))
    return data.batch(BATCH, drop_remainder=True).repeat()


def with_collectives(steps):
    """Trains by `fit` under MultiWorkerMirroredStrategy."""
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        model = make_model()
        model.compile(make_optimizer(), "mse", metrics=["mae"])
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    model.fit(
        dataset(rank).with_options(options),
        epochs=EPOCHS,
        steps_per_epoch=steps // EPOCHS,
        validation_data=dataset(9).take(4).with_options(options),
        shuffle=False,
        verbose=0,
    )


def with_servers(mode, steps):
    """Trains by parameter servers, in rounds or without a barrier."""
    trainer = tfgradcomp.ParameterServerTrainer(
        make_model, make_optimizer(), loss="mse", metrics=["mae"], mode=mode
    )
    trainer.fit(
        lambda context: dataset(context.input_pipeline_id),
        epochs=EPOCHS,
        steps_per_epoch=steps // EPOCHS,
        verbose=0,
    )


if __name__ == "__main__":
    way, steps = sys.argv[1], int(sys.argv[2])
    if way == "collectives":
        with_collectives(steps)
    else:
        with_servers(way, steps)
