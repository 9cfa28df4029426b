"""One worker: trains with a backup, in one of several ways, and reports."""

import hashlib
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import report

FOLDER, MODE = sys.argv[1:3]
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
RANK = STRATEGY.cluster_resolver.task_id
BACKUP = Path(FOLDER, "backup")
random = np.random.default_rng(7)
X = random.normal(size=(48, 64)).astype("float32")
Y = random.normal(size=(48, 3)).astype("float32")


class Interrupt(keras.callbacks.Callback):
    """Ends the run in the third epoch; on worker 1 before its backup is written."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and RANK == 1:
            raise KeyboardInterrupt


class InterruptLater(keras.callbacks.Callback):
    """Ends the run in the third epoch, on worker 0 after its backup is written."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def run():
    """Trains for five epochs, or as far as it goes."""
    keras.utils.set_random_seed(3)
    with STRATEGY.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(40, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
        schedule = keras.optimizers.schedules.CosineDecay(0.02, 30)
        optimizer = tfgradcomp.DistEFBlockSGDM(
            keras.optimizers.SGD(schedule), transport="sharded"
        )
        model.compile(optimizer, "mse")
    callbacks = []
    if MODE != "uninterrupted":
        keep = MODE in ("interrupt", "resume_and_keep")
        backup = tfgradcomp.callbacks.BackupAndRestore(str(BACKUP), not keep)
        callbacks = [backup]
    if MODE == "interrupt":
        callbacks = [Interrupt(), backup, InterruptLater()]
    answer = {}
    try:
        history = model.fit(
            X, Y, batch_size=12, epochs=5, verbose=0, shuffle=False, callbacks=callbacks
        )
        answer["epochs"] = history.epoch
    except KeyboardInterrupt:
        answer["epochs"] = "interrupted"
    except ValueError as error:
        answer["error"] = str(error)
    data = b"".join(w.tobytes() for w in model.get_weights())
    answer["digest"] = hashlib.sha256(data).hexdigest()
    answer["residual"] = [
        v.numpy().tolist()
        for v in model.optimizer.variables
        if v.name == "compressed.worker.residual"
    ]
    folder = BACKUP / f"worker-{RANK}"
    answer["left"] = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return answer


report(FOLDER, RANK, run())
