"""What tests run in all roles: training during which a task is killed.

`loss_worker.py folder mode on_worker_loss task...`: the chief kills the tasks named
("worker 1") one after the other, in the fourth round of epochs 0, 1, ...
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras

import tfgradcomp
from tests.cluster import report
from tests.parameter_server import train_worker as common

EPOCHS, STEPS = 3, 8


class Kill(keras.callbacks.Callback):
    """Kills a task with SIGKILL while the round after the fourth is run."""

    def __init__(self, folder, tasks):
        super().__init__()
        self._folder, self._tasks = Path(folder), list(tasks)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self._tasks:
            pid = (self._folder / self._tasks.pop(0)).read_text()
            os.kill(int(pid), signal.SIGKILL)


def main(folder, mode, on_worker_loss, *tasks):
    task = json.loads(os.environ["TF_CONFIG"])["task"]
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
            callbacks=[Kill(folder, tasks)],
            verbose=0,
        )
        answer["loss"] = history.history["loss"]
        answer["workers"] = [common.digest(w) for w in trainer.weights_of_workers()]
        answer["chief"] = common.digest(
            weight.numpy() for weight in trainer.model.trainable_weights
        )
        answer["iterations"] = int(trainer.optimizer.iterations.numpy())
    except tfgradcomp.ParameterServerLostError as error:
        answer["error"] = str(error)
    report(folder, 0, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
