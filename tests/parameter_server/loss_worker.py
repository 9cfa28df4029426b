"""What tests run in all roles: training during which a task is killed.

`loss_worker.py folder mode on_worker_loss task...`: the chief kills the tasks named
("worker 1", "nobody 0") one after the other, in the middle of epochs 0, 1, ... It waits
at the end of the epoch for a task that is said to come back ("worker 1 back").
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import keras

import tfgradcomp
from tests.cluster import report
from tests.parameter_server import train_worker as common

EPOCHS, STEPS = 3, 8


class Kill(keras.callbacks.Callback):
    """Kills a task with SIGKILL after the fourth step of an epoch."""

    def __init__(self, folder, tasks, cluster):
        super().__init__()
        self._folder, self._tasks, self._cluster = Path(folder), list(tasks), cluster
        self._expected = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self._tasks:
            job, index, *back = self._tasks.pop(0).split()
            if job == "nobody":
                return
            pid = (self._folder / f"{job} {index}").read_text()
            os.kill(int(pid), signal.SIGKILL)
            if back:
                self._expected = self._cluster[job][int(index)]

    def on_epoch_end(self, epoch, logs=None):
        while self._expected:
            host, port = self._expected.split(":")
            try:
                socket.create_connection((host, int(port))).close()
                self._expected = None
            except OSError:
                time.sleep(0.2)


def main(folder, mode, on_worker_loss, *tasks):
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    name = f"{task['type']} {task['index']}"
    (Path(folder) / name).write_text(str(os.getpid()))
    keras.utils.set_random_seed(0)
    trainer = tfgradcomp.ParameterServerTrainer(
        common.make_model,
        common.METHODS["DistEF"](),
        mode=mode,
        on_worker_loss=on_worker_loss,
        steps_per_execution=2,
        **common.COMPILE,
    )
    answer = {"error": None}
    try:
        history = trainer.fit(
            common.dataset,
            epochs=EPOCHS,
            steps_per_epoch=STEPS,
            callbacks=[
                keras.callbacks.BackupAndRestore(f"{folder}/backup"),
                Kill(folder, tasks, config["cluster"]),
            ],
            verbose=0,
        )
        answer["loss"] = history.history["loss"]
        answer["workers"] = [common.digest(w) for w in trainer.weights_of_workers()]
        answer["chief"] = common.digest(
            weight.numpy() for weight in trainer.model.trainable_weights
        )
        answer["iterations"] = int(trainer.optimizer.iterations.numpy())
    except ConnectionError as error:
        answer["error"] = str(error)
    report(folder, 0, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
