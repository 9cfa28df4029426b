"""A training in all roles, during which tasks are stopped or killed.

`fault_worker.py folder mode on_worker_loss fault... / fault...`: a training for each
group, with an epoch for each fault: `none`, or `stop:worker:1`, `go:worker:1`,
`kill:chief:0`. A fault comes after the third step, `stop:worker:1:save` at the end of
the epoch before its backup, and `stop:worker:1:trace` before the training. The first
training has a backup. The chief records events with their times.
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
from tests.parameter_server.train_worker import digest

FEATURES, STEPS = 50, 6
SIGNALS = {"stop": signal.SIGSTOP, "go": signal.SIGCONT, "kill": signal.SIGKILL}


def make_model():
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )


def dataset(context):
    """The same batches in every epoch, different on each worker."""
    rng = np.random.default_rng(context.input_pipeline_id)
    x = rng.normal(size=(STEPS, 8, FEATURES)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).repeat()


class Faults(keras.callbacks.Callback):
    """Stops, continues or kills tasks, and records events."""

    def __init__(self, folder, training, faults, trainer):
        super().__init__()
        self._folder, self._faults, self._trainer = folder, faults, trainer
        self._training, self._epoch = training, 0
        self._signal("trace")

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self._signal("")

    def on_epoch_end(self, epoch, logs=None):
        self._signal("save")

    def on_train_end(self, logs=None):
        workers = self._trainer.weights_of_workers()
        rounds = int(self._trainer.optimizer.iterations.numpy())
        self.note("end", workers=[*map(digest, workers)], rounds=rounds)

    def _signal(self, where):
        fault = self._faults[self._epoch]
        what, *task = fault.split(":")
        if what == "none" or task[2:] != ([where] if where else []):
            return
        events = self._folder / "events"
        if what == "kill" and events.exists() and fault in events.read_text():
            # The restarted chief is not killed again.
            return
        self.note(fault)
        os.kill(int((self._folder / "-".join(task[:2])).read_text()), SIGNALS[what])

    def note(self, event, **more):
        note = {"event": event, "training": self._training, "time": time.time(), **more}
        with open(self._folder / "events", "a") as file:
            file.write(json.dumps(note) + "\n")


class Epochs(keras.callbacks.Callback):
    """Records the end of each epoch, after its backup."""

    def __init__(self, faults):
        super().__init__()
        self._faults = faults

    def on_epoch_end(self, epoch, logs=None):
        self._faults.note(f"epoch {epoch}")


def main(folder, mode, on_worker_loss, *faults):
    folder = Path(folder)
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    (folder / f"{task['type']}-{task['index']}").write_text(str(os.getpid()))
    for training, group in enumerate(" ".join(faults).split(" / ")):
        keras.utils.set_random_seed(0)
        trainer = tfgradcomp.ParameterServerTrainer(
            make_model,
            tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.01)),
            loss="mse",
            mode=mode,
            on_worker_loss=on_worker_loss,
        )
        events = Faults(folder, training, group.split(), trainer)
        backup = [] if training else [keras.callbacks.BackupAndRestore(folder / "b")]
        trainer.fit(
            dataset,
            epochs=len(group.split()),
            steps_per_epoch=STEPS,
            callbacks=[events, *backup, Epochs(events)],
            verbose=0,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
