"""What a worker does in the tests of backups: a training that is interrupted or not.

A pool runs `train`; as a script this is one worker of a cluster that the launcher has
started.
"""

import hashlib
import sys
from pathlib import Path

import keras
import numpy as np

import tfgradcomp
from tests.cluster import report, strategy_and_rank

random = np.random.default_rng(7)
X = random.normal(size=(48, 64)).astype("float32")
Y = random.normal(size=(48, 3)).astype("float32")


class Interrupt(keras.callbacks.Callback):
    """Ends the run in the third epoch; on worker 1 before its backup is written."""

    def on_epoch_end(self, epoch, logs=None):
        _, rank = strategy_and_rank()
        if epoch == 2 and rank == 1:
            raise KeyboardInterrupt


class InterruptLater(keras.callbacks.Callback):
    """Ends the run in the third epoch, on worker 0 after its backup is written."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def train(folder, mode):
    """Trains for five epochs, or as far as it goes.

    Args:
        folder: Where the backup is.
        mode: `"uninterrupted"`, without a backup; `"interrupt"`; `"resume"`.
    """
    strategy, rank = strategy_and_rank()
    directory = Path(folder, "backup")
    keras.utils.set_random_seed(3)
    with strategy.scope():
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
    if mode != "uninterrupted":
        backup = tfgradcomp.callbacks.BackupAndRestore(
            str(directory), mode != "interrupt"
        )
        callbacks = [backup]
    if mode == "interrupt":
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
    own = directory / f"worker-{rank}"
    answer["left"] = sorted(p.name for p in own.iterdir()) if own.is_dir() else []
    return answer


if __name__ == "__main__":
    report(sys.argv[1], strategy_and_rank()[1], train(*sys.argv[1:3]))
