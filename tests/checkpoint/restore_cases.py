"""Trainings that the workers of a pool save, and resume under other transports."""

import keras
import numpy as np

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import digest
from tfgradcomp.checkpoint import backups

EPOCHS, SAVED = 4, 2
random = np.random.default_rng(7)
X = random.normal(size=(24, 64)).astype("float32")
Y = random.normal(size=(24, 3)).astype("float32")


def compiled(transport, bucket_bytes):
    """Returns a model of 2723 weights whose server keeps a state, in equal blocks."""
    keras.utils.set_random_seed(3)
    layers = keras.Input((64,)), keras.layers.Dense(40), keras.layers.Dense(3)
    model = keras.Sequential(layers)
    optimizer = tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.02),
        block_size=256,
        weight_decay=0.01,
        min_size=1,
        transport=transport,
        bucket_bytes=bucket_bytes,
    )
    model.compile(optimizer, "mse")
    return model


def fit(model, epochs=EPOCHS, callbacks=()):
    options = {"batch_size": 12, "verbose": 0, "shuffle": False}
    model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options)


def describe(model):
    """Returns hashes of the weights, and of this worker's state as a file has it."""
    store = {}
    model.optimizer.save_own_variables(store)
    state = {name: np.asarray(value) for name, value in store.items()}
    return {
        "weights": digest(model),
        "state": {n: digest([v]) for n, v in state.items() if ".server" not in n},
        "server": state["compressed.server.residual"][0],
        "owned": state["compressed.server_owned"].tolist(),
    }


def train(folder, transport, bucket_bytes, epochs=EPOCHS):
    """Trains with a backup, starting after the epochs of the backup."""
    strategy, _ = strategy_and_rank()
    with strategy.scope():
        model = compiled(transport, bucket_bytes)
    backup = tfgradcomp.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    try:
        fit(model, epochs, [backup])
    except ValueError as error:
        return {"error": str(error)}
    return describe(model)


def load(folder, sources, transport, bucket_bytes, has_begun):
    """Trains after this worker has loaded a file of the backup.

    Args:
        folder: The backup.
        sources: For each worker, the rank of the file that it loads; None: no file.
        transport: The transport.
        bucket_bytes: Size of the buckets.
        has_begun: True: an epoch is trained before.
    """
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        model = compiled(transport, bucket_bytes)
        if not has_begun:
            model.optimizer.build(model.trainable_variables)
    if has_begun:
        fit(model, epochs=1)
    raised_by = "load_weights"
    try:
        if sources[rank] is not None:
            source = backups.worker_folder(folder, sources[rank])
            point = backups.Point(SAVED)
            model.load_weights(backups.weights_file(source, point))
        raised_by = "fit"
        fit(model, epochs=EPOCHS - SAVED)
    except ValueError as error:
        return {"raised_by": raised_by, "error": str(error)}
    return describe(model)
