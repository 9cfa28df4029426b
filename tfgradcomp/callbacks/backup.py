"""Keras callbacks for training on several workers."""

from __future__ import annotations

import shutil

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.checkpoint import backups
from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat.trainer import prepare_to_resume, random_states

# Keras saves no random states, and dropout would differ after a restart.
_RANDOM = "random.npz"


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes `fit` after an interruption, each worker from a folder of its own.

    At the end of each epoch every worker writes its weights, its optimizer's state,
    residuals included, and the random states of its layers to
    `directory/worker-<rank>/epoch-<n>`. A folder appears when it is complete, and the
    last two are kept: workers do not die at the same moment. At the next start all
    workers agree on the newest epoch that every one of them has, and go on from there:
    with the same number of workers, and data that is the same in every epoch, to the
    same bits as without the interruption.

    Args:
        directory: Folder on a disk of each machine, or on one that all share.
        delete_checkpoint: Whether the folders go when training has ended well.

    Raises:
        ValueError: At the start of training, if the model is not built, the folders
            are of another number of workers, or a worker's are missing.

    Example:
        ```python
        backup = tfgradcomp.callbacks.BackupAndRestore("/data/backup")
        model.fit(dataset, epochs=90, callbacks=[backup])
        ```
    """

    def __init__(self, directory: str, delete_checkpoint: bool = True):
        super().__init__()
        if not directory:
            raise ValueError(f"directory must be a path. Received: {directory!r}")
        self.directory = directory
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs=None):
        """Restores the newest epoch that all workers have, if there is one."""
        hosts = self._hosts()
        rank = hosts.process_index if hosts else 0
        num_workers = hosts.num_workers if hosts else 1
        self._folder = backups.worker_folder(self.directory, rank)
        mine = backups.epochs_in(self._folder)[-backups.KEPT :]
        saved = backups.read_num_workers(self._folder, mine[-1]) if mine else 0
        row = [saved, *mine, *[0] * (backups.KEPT - len(mine))]
        rows = [row]
        if hosts:
            rows = hosts.gather(tf.constant(row, tf.int64), "backup").numpy().tolist()
        others = {row[0] for row in rows} - {0, num_workers}
        if others:
            raise ValueError(
                f"The backup in {self.directory} is of {others.pop()} workers, this "
                f"training has {num_workers}. Convert it with: "
                f"python -m tfgradcomp.reshard {self.directory} "
                f"--workers {num_workers} --out NEW"
            )
        newest = max(max(row[1:]) for row in rows)
        common = set.intersection(*(set(row[1:]) for row in rows)) - {0}
        if not common:
            # Workers are at most one epoch apart, so this was the first one's end.
            if newest > 1:
                found = {
                    worker: sorted({*row[1:]} - {0}) for worker, row in enumerate(rows)
                }
                raise ValueError(
                    "No epoch is whole on every worker. Bring back the missing "
                    f"folders, or remove {self.directory} to start at the beginning. "
                    f"Received: epochs by worker={found}"
                )
            return
        epoch = max(common)
        prepare_to_resume(self.model, epoch)
        source = backups.epoch_folder(self._folder, epoch)
        self.model.load_weights(source / backups.WEIGHTS)
        with np.load(source / _RANDOM) as saved:
            for path, variable in random_states(self.model).items():
                variable.assign(saved[path])

    def on_epoch_end(self, epoch, logs=None):
        """Writes the state of this worker."""
        hosts = self._hosts()

        def save(folder):
            self.model.save_weights(folder / backups.WEIGHTS)
            states = random_states(self.model)
            np.savez(folder / _RANDOM, **{k: v.numpy() for k, v in states.items()})

        num_workers = hosts.num_workers if hosts else 1
        backups.write(self._folder, epoch + 1, num_workers, save)

    def on_train_end(self, logs=None):
        """Removes this worker's folder, when all workers are here."""
        if not self.delete_checkpoint:
            return
        hosts = self._hosts()
        if hosts:
            hosts.gather(tf.constant([1]), "backup/end")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hosts(self):
        return across_hosts(self.model.distribute_strategy)
