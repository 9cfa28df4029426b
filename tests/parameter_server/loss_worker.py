"""Script of all roles: training during which a task is killed.

`loss_worker.py folder mode on_worker_loss task...`: in the middle of epochs 0, 1, ...
the chief kills the named task ("worker 1"; "nobody 0": none). With "worker 1 back" it
waits at the end of the epoch for the restarted task. With "worker 1 then worker 2" it
kills the second task while it recovers from the loss of the first.
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

    def __init__(self, folder, tasks, trainer):
        super().__init__()
        self._folder, self._tasks, self._trainer = Path(folder), list(tasks), trainer
        self._expected = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self._tasks:
            task, _, second = self._tasks.pop(0).partition(" then ")
            job, index, *back = task.split()
            if job == "nobody":
                return
            self._kill(job, index)
            if second:
                membership = self._trainer._membership
                resume_without = membership.resume_without

                def kill_and_resume(lost):
                    membership.resume_without = resume_without
                    self._kill(*second.split())
                    resume_without(lost)

                membership.resume_without = kill_and_resume
            if back:
                cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
                self._expected = cluster[job][int(index)]

    def _kill(self, job, index):
        pid = (self._folder / f"{job} {index}").read_text()
        os.kill(int(pid), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        while self._expected:
            host, port = self._expected.split(":")
            try:
                socket.create_connection((host, int(port))).close()
                self._expected = None
            except OSError:
                time.sleep(0.2)


def make_trainer(mode, on_worker_loss="continue"):
    keras.utils.set_random_seed(0)
    return tfgradcomp.ParameterServerTrainer(
        common.make_model,
        common.optimizer_of("DistEFBlockSGDM"),
        mode=mode,
        on_worker_loss=on_worker_loss,
        steps_per_execution=2,
        **common.COMPILE,
    )


def dataset(context):
    """The same batches in every epoch."""
    return common.dataset(context).take(STEPS // 2).repeat()


def fit(trainer, *callbacks):
    history = trainer.fit(
        dataset,
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        callbacks=callbacks,
        verbose=0,
    )
    return {
        "loss": history.history["loss"],
        "workers": [common.digest(w) for w in trainer.weights_of_workers()],
        "chief": common.digest(w.numpy() for w in trainer.model.trainable_weights),
        "iterations": int(trainer.optimizer.iterations.numpy()),
    }


def main(folder, mode, on_worker_loss, *tasks):
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    name = f"{task['type']} {task['index']}"
    (Path(folder) / name).write_text(str(os.getpid()))
    trainer = make_trainer(mode, on_worker_loss)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
    try:
        answer = fit(trainer, backup, Kill(folder, tasks, trainer))
        if not tasks:
            answer["uninterrupted"] = fit(make_trainer(mode))
    except ConnectionError as error:
        answer = {"error": str(error)}
    report(folder, 0, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
