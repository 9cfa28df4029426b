"""Keras callback that saves and resumes training on several workers."""

from __future__ import annotations

import contextlib
import shutil
import zipfile

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.checkpoint import backups
from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat.statistics import digest_of_weights
from tfgradcomp.compat.trainer import prepare_to_resume, random_states
from tfgradcomp.core.logging import logger

# Keras saves no random states, without which dropout would differ after a restart.
_RANDOM = "random.npz"


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes `fit` after an interruption, each worker from a folder of its own.

    At the end of each epoch every worker writes its weights, its optimizer's state,
    residuals included, and the random states of its layers to
    `directory/worker-<rank>/epoch-<n>`. A folder appears when it is complete, and the
    last two are kept, because workers do not die at the same moment. At the next start
    all workers agree on the newest epoch that every one of them has, and resume there;
    what is cut off or cannot be read does not count.
    With the same number of workers, and data that is the same in every epoch, the
    result has the same bits as without the interruption, also under another transport
    or with buckets of another size.

    Args:
        directory: Folder on a disk of each machine, or on one that all share.
        delete_checkpoint: True: the folders are removed when training has ended well.

    Raises:
        ValueError: On all workers, at the start of training: if the model is not built,
            the folders are of another number of workers or were exchanged, or if no
            epoch is whole on every worker.

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
        self._origin = backups.Origin(
            hosts.process_index if hosts else 0, hosts.num_workers if hosts else 1
        )
        self._folder = backups.worker_folder(self.directory, self._origin.rank)
        epoch = self._common_epoch()
        if epoch is None:
            return
        source = backups.epoch_folder(self._folder, epoch)
        prepare_to_resume(self.model, epoch)
        self.model.load_weights(source / backups.WEIGHTS)
        with np.load(source / _RANDOM) as saved:
            for path, variable in random_states(self.model).items():
                variable.assign(saved[path])

    def on_epoch_end(self, epoch, logs=None):
        """Writes the state of this worker."""

        def save(folder):
            self.model.save_weights(folder / backups.WEIGHTS)
            (folder / backups.DIGEST).write_text(digest_of_weights(self.model))
            states = random_states(self.model)
            np.savez(folder / _RANDOM, **{k: v.numpy() for k, v in states.items()})

        backups.write(self._folder, epoch + 1, self._origin, save)

    def on_train_end(self, logs=None):
        """Removes this worker's folder once all workers have finished."""
        if self.delete_checkpoint:
            self._gather([1], "backup/end")
            shutil.rmtree(self._folder, ignore_errors=True)

    def _common_epoch(self) -> int | None:
        """Returns the newest epoch that all workers have; None if there is no backup.

        Raises:
            ValueError: On all workers, if the folders do not belong together.
        """
        row = []
        for epoch in self._readable_epochs():
            row += [epoch, *backups.read_origin(self._folder, epoch)]
        row += [0] * (3 * backups.KEPT - len(row))
        gathered = np.reshape(self._gather(row, "backup"), [-1, backups.KEPT, 3])
        # By workers, the origins of the epochs that each of them has.
        found = [
            {epoch: backups.Origin(*origin) for epoch, *origin in rows if epoch}
            for rows in gathered.tolist()
        ]
        self._check_origins(found)
        common = set.intersection(*map(set, found))
        if common:
            return max(common)
        # Workers are at most one epoch apart, so without a second epoch they were
        # interrupted at the end of the first.
        if any(max(epochs, default=0) > 1 for epochs in found):
            raise ValueError(
                "No epoch is whole on every worker. Bring back the missing folders, or "
                f"remove {self.directory} to start at the beginning. Received: epochs "
                f"by worker={ {rank: [*epochs] for rank, epochs in enumerate(found)} }"
            )
        return None

    def _check_origins(self, found):
        num_workers = self._origin.num_workers
        origins = {rank: {*epochs.values()} for rank, epochs in enumerate(found)}
        counts = {origin.num_workers for own in origins.values() for origin in own}
        if counts - {num_workers}:
            saved = max(counts - {num_workers})
            raise ValueError(
                f"The backup in {self.directory} is of {saved} workers, this training "
                f"has {num_workers}. Convert it with: python -m tfgradcomp.reshard "
                f"{self.directory} --workers {num_workers} --out NEW"
            )
        writers = {
            rank: sorted(origin.rank for origin in own) for rank, own in origins.items()
        }
        if any(own not in ([], [rank]) for rank, own in writers.items()):
            raise ValueError(
                f"Folders in {self.directory} were exchanged: each must be of the "
                "worker in its name. Bring back those of every worker, or remove them "
                "all to start at the beginning. Received: the ranks that wrote the "
                f"folders of each worker={writers}"
            )

    def _readable_epochs(self) -> list[int]:
        """Returns the epochs that this worker has and can read, the newest last."""
        found = []
        for epoch in backups.epochs_in(self._folder)[-backups.KEPT :]:
            source = backups.epoch_folder(self._folder, epoch)
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(h5py.File(source / backups.WEIGHTS))
                    stack.enter_context(np.load(source / _RANDOM))
                found.append(epoch)
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                logger.warning("%s cannot be read and is left out: %s", source, error)
        return found

    def _gather(self, row: list[int], call_site: str) -> np.ndarray:
        """Returns the rows of all workers, `[N, len(row)]`."""
        hosts = self._hosts()
        if not hosts:
            return np.array([row])
        return hosts.gather(tf.constant(row, tf.int64), call_site).numpy()

    def _hosts(self):
        return across_hosts(self.model.distribute_strategy)
