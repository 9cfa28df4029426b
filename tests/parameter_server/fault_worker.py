"""What tests run in all roles: training during which a task is stopped or killed.

`fault_worker.py folder mode fault...`: before step 3 of epoch k the chief does what the
k-th fault says: `stop:worker:1`, `go:worker:1`, `kill:chief:0`, or `none`. It writes
down when each epoch ended, and what the weights were.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp

FEATURES, STEPS = 50, 6
SIGNALS = {"stop": signal.SIGSTOP, "go": signal.SIGCONT, "kill": signal.SIGKILL}


def make_model():
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )


def dataset(context):
    """The same batches in every epoch, others on each worker."""
    rng = np.random.default_rng(context.input_pipeline_id)
    x = rng.normal(size=(STEPS, 8, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).repeat()


class Faults(keras.callbacks.Callback):
    """Stops, continues or kills tasks, and writes down what follows."""

    def __init__(self, folder, faults, trainer):
        super().__init__()
        self._folder, self._faults, self._trainer = folder, faults, trainer
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        faults = self._faults.pop(self._epoch, "none") if batch == 2 else "none"
        for fault in faults.split("+"):
            if fault == "none":
                continue
            what, job, index = fault.split(":")
            if what == "kill" and fault in (self._folder / "events").read_text():
                # The chief that was started again is left alone.
                continue
            self._note(fault)
            pid = int((self._folder / f"{job}-{index}").read_text())
            os.kill(pid, SIGNALS[what])

    def on_epoch_end(self, epoch, logs=None):
        workers = [
            [float(np.sum(np.abs(weight))) for weight in weights]
            for weights in self._trainer.weights_of_workers()
        ]
        self._note(f"epoch {epoch}", workers=workers, loss=logs["loss"])

    def _note(self, event, **more):
        note = {"event": event, "time": time.time(), **more}
        with open(self._folder / "events", "a") as file:
            file.write(json.dumps(note) + "\n")
            file.flush()


def main(folder, mode, *faults):
    folder = Path(folder)
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    (folder / f"{task['type']}-{task['index']}").write_text(str(os.getpid()))
    keras.utils.set_random_seed(0)
    trainer = tfgradcomp.ParameterServerTrainer(
        make_model,
        tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.01)),
        loss="mse",
        mode=mode,
    )
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    events = Faults(folder, dict(enumerate(faults)), trainer)
    trainer.fit(
        dataset,
        epochs=len(faults),
        steps_per_epoch=STEPS,
        callbacks=[events, backup],
        verbose=0,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
