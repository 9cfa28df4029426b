"""A training that one fault strikes once, on one worker; later attempts are whole.

As a script it is one worker of a cluster that the launcher has started:
`program.py folder signal phase rank`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import report, strategy_and_rank
from tests.fit.fit_models import digest, residuals

EPOCHS, BATCHES = 4, 5
# The epoch that the fault strikes in, so that there is a backup to go back to.
EPOCH = 1
PHASES = ("trace", "exchange", "logs", "evaluate", "save")
random = np.random.default_rng(7)
X = random.normal(size=(12 * BATCHES, 64)).astype("float32")
Y = random.normal(size=(12 * BATCHES, 3)).astype("float32")


class Fault(keras.callbacks.Callback):
    """Strikes this process once in all attempts, when its phase has come.

    Args:
        folder: Where the moment is written, which says that it has struck.
        signal_name: The signal that the process sends to itself; "none" for never.
        phase: One of `PHASES`; or "slow", to wait before each step and not strike.
        is_here: Whether this is the worker to strike.
    """

    def __init__(self, folder, signal_name, phase, is_here):
        super().__init__()
        self.moment = Path(folder, "moment")
        self.signal_name, self.phase, self.is_here = signal_name, phase, is_here
        self.epoch = -1

    def at(self, phase):
        """Strikes if this is the phase."""
        # A step is traced once.
        is_due = self.epoch == (0 if phase == "trace" else EPOCH)
        if not self.is_here or phase != self.phase or not is_due:
            return
        if self.signal_name == "none" or self.moment.exists():
            return
        self.moment.write_text(repr(time.time()))
        os.kill(os.getpid(), getattr(signal, self.signal_name))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.phase == "slow":
            time.sleep(0.5)
        if batch == 2:
            self.at("exchange")

    def on_test_batch_begin(self, batch, logs=None):
        if batch == 1:
            self.at("evaluate")


class Layer(keras.layers.Layer):
    """Changes nothing; says when a step is traced."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def call(self, x):
        if tf.inside_function():
            self.fault.at("trace")
        return x


class Metric(keras.metrics.Mean):
    """A mean; says when logs are made."""

    def __init__(self, fault):
        super().__init__(name="mine")
        self.fault = fault

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(tf.abs(y_true - y_pred))

    def result(self):
        if not tf.inside_function():
            self.fault.at("logs")
        return super().result()


def train(folder, signal_name, phase, rank):
    """Trains with backups; returns what the worker ends with."""
    strategy, own_rank = strategy_and_rank()
    fault = Fault(folder, signal_name, phase, own_rank == rank)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(40, activation="relu"),
                Layer(fault),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
        optimizer = tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.02))
        model.compile(optimizer, "mse", metrics=[Metric(fault)])
    save = model.save_weights

    def save_weights(*args, **kwargs):
        save(*args, **kwargs)
        # Its file is there; the backup is not whole.
        fault.at("save")

    model.save_weights = save_weights
    backup = tfgradcomp.callbacks.BackupAndRestore(str(Path(folder, "backup")))
    history = model.fit(
        *(X, Y),
        batch_size=12,
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        validation_data=(X, Y),
        callbacks=[fault, backup],
    )
    return {
        "digest": digest(model),
        "residuals": residuals(model),
        "epochs": history.epoch,
        "ended": time.time(),
    }


if __name__ == "__main__":
    folder, signal_name, phase, rank = sys.argv[1:]
    answer = train(folder, signal_name, phase, int(rank))
    report(folder, strategy_and_rank()[1], answer)
