"""Keras callback that saves and resumes training on several workers."""

from __future__ import annotations

import contextlib
import shutil
import sys
import zipfile

import h5py
import keras
import numpy as np

from tfgradcomp.callbacks.workers import Workers
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Origin, Point
from tfgradcomp.core.logging import logger
from tfgradcomp.fit.preemption import Preemption
from tfgradcomp.fit.resume import prepare_to_resume
from tfgradcomp.fit.run_state import RunState
from tfgradcomp.fit.statistics import digest_of_weights

PREEMPTED = 79
"""Exit code of workers that were told to end and have saved: start them again."""

# State that files of weights lack: without it, dropout would differ after a restart.
_RUN_STATE = "random.npz"
# The points that are kept, and a newer point that other workers may lack.
_MOST_POINTS = backups.KEPT + 1


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes `fit` after an interruption, each worker from its own folder.

    At the end of each epoch, or every `save_freq` batches, each worker writes its
    weights, its optimizer's state with the residuals, and the random states of its
    layers to `directory/worker-<rank>/epoch-<n>`. A folder appears when it is complete,
    and the last two are kept. At the next start all workers resume from the newest
    backup that every one of them has and can read; batches that an epoch had already
    taken are skipped. With the same number of workers, and the same data in every
    epoch, the result has the same bits as without the interruption, also under another
    transport or with buckets of another size.

    If a backup cannot be written, as on a full disk, all workers log a warning:
    training goes on, and the older backup stays.

    When a scheduler takes a machine away, it sends SIGTERM. SIGTERM to any worker makes
    all workers end the step, save, and exit with code 79 (`PREEMPTED`). In a validation
    they save at once and exit after it. A second SIGTERM ends a worker at once. A
    program's own handler of SIGTERM is kept.

    Args:
        directory: Folder on a disk of each machine, or on a shared disk.
        delete_checkpoint: True: the folders are removed when training has succeeded.
        save_freq: `"epoch"`, or the number of batches between two backups.

    Raises:
        ValueError: On all workers, at the start of training: if the model is not built,
            if the folders are of another number of workers or were exchanged, or if no
            backup can be restored on every worker.

    Example:
        ```python
        backup = tfgradcomp.callbacks.BackupAndRestore("/data/backup", save_freq=500)
        model.fit(dataset, epochs=90, callbacks=[backup])
        ```
    """

    def __init__(
        self,
        directory: str,
        delete_checkpoint: bool = True,
        save_freq: str | int = "epoch",
    ):
        super().__init__()
        if not directory:
            raise ValueError(f"directory must be a path. Received: {directory=}")
        is_count = isinstance(save_freq, int) and not isinstance(save_freq, bool)
        if save_freq != "epoch" and not (is_count and int(save_freq) > 0):
            raise ValueError(
                'save_freq must be "epoch" or a number of batches, 1 or more. '
                f"Received: {save_freq=}"
            )
        self.directory = directory
        self.delete_checkpoint = delete_checkpoint
        self.save_freq = save_freq
        self._preemption: Preemption | None = None

    def on_train_begin(self, logs=None):
        """Restores the newest backup that all workers have, if there is one."""
        self._workers = Workers(self.model)
        self._origin = Origin(self._workers.rank, self._workers.num_workers)
        self._folder = backups.worker_folder(self.directory, self._origin.rank)
        self._state = RunState(self.model)
        self._epoch = self._batch = self._unsaved_batches = 0
        self._has_trained = False
        self._run_state: dict[str, np.ndarray] = {}
        self._newest = self._restore_newest(self._common_points())
        self._preemption = Preemption(self.model)
        self._preemption.begin()

    def on_epoch_begin(self, epoch, logs=None):
        """Restores the metrics of an epoch that was interrupted."""
        self._epoch, self._batch = epoch, 0
        if self._run_state and self._newest and self._newest.batch:
            self._batch = self._newest.batch
            self._state.assign_metrics(self._run_state)
        self._run_state = {}
        if preempted_workers := self._preempted_workers():
            self._end(preempted_workers)

    def on_train_batch_end(self, batch, logs=None):
        """Writes this worker's state, if it is time."""
        self._unsaved_batches += batch + 1 - self._batch
        self._batch, self._has_trained = batch + 1, True
        preempted_workers = self._preempted_workers()
        steps = (self.params or {}).get("steps")
        if steps is not None and self._batch >= steps:
            # The epoch ends next, and a backup of its end is better to resume from.
            return
        if self._is_due():
            self._save()
        if preempted_workers:
            self._end(preempted_workers)

    def on_test_batch_end(self, batch, logs=None):
        """Writes this worker's state in a validation that may be cut off."""
        if self._batch and self._preempted_workers():
            self._epoch, self._batch = self._epoch + 1, 0
            self._save()
            # Saves again when the epoch has ended.
            self._unsaved_batches = 1

    def on_epoch_end(self, epoch, logs=None):
        """Writes this worker's state."""
        self._epoch, self._batch = epoch + 1, 0
        # If an epoch resumes after its last batch, it trains nothing.
        if self._has_trained and (self.save_freq == "epoch" or self._is_due()):
            self._save()

    def on_train_end(self, logs=None):
        """Removes this worker's folder once all workers have finished."""
        if self._preemption:
            self._preemption.end()
            self._preemption = None
        if self.delete_checkpoint:
            self._workers.gather([1], "backup/end")
            shutil.rmtree(self._folder, ignore_errors=True)

    def _is_due(self) -> bool:
        every = self.save_freq
        return every != "epoch" and self._unsaved_batches >= int(every)

    def _preempted_workers(self) -> list[int]:
        """Returns the workers that were told to end, the same on all workers."""
        return self._preemption.workers() if self._preemption else []

    def _end(self, preempted_workers: list[int]) -> None:
        """Saves and ends the process, because some workers were told to end."""
        if self._unsaved_batches:
            self._save()
        logger.warning(
            "SIGTERM has come to workers %s: all end with code %d, the newest backup "
            "is that of %s.",
            preempted_workers,
            PREEMPTED,
            self._newest or "no moment",
        )
        sys.exit(PREEMPTED)

    def _save(self) -> None:
        """Writes a backup, which counts if all workers have written theirs.

        Raises:
            RuntimeError: On all workers, if a worker raised another error than of I/O.
        """
        point = Point(self._epoch, self._batch)
        self._unsaved_batches = 0

        def save(folder):
            self.model.save_weights(folder / backups.WEIGHTS)
            (folder / backups.DIGEST).write_text(digest_of_weights(self.model))
            np.savez(folder / _RUN_STATE, allow_pickle=False, **self._state.read())

        arguments = self._folder, point, self._origin, save, self._newest is None
        outcome = self._workers.run(backups.write, "backup/written", *arguments)
        if not outcome.failures:
            self._newest = point
            with contextlib.suppress(OSError):
                backups.drop_old(self._folder)
            return
        # Some worker lacks it, so it could never be restored.
        backups.remove(self._folder, point)
        message = (
            f"The backup of {point} is not written, because of {outcome.failures}."
        )
        if not outcome.is_io:
            raise RuntimeError(message) from outcome.error
        logger.warning(
            "%s Training goes on; the newest backup is that of %s.",
            message,
            self._newest or "no moment",
        )

    def _restore_newest(self, points: list[Point]) -> Point | None:
        """Restores the newest of the points that all workers can read, and returns it.

        Args:
            points: The points that all workers have.

        Raises:
            ValueError: On all workers, if there are points but none can be read.
        """
        newest_failures = ""
        for point in sorted(points, reverse=True):
            # Loading may wait for all workers: each must have read its files before.
            for action in (self._read_through, self._restore):
                failures = self._workers.run(action, "backup/restored", point).failures
                if failures:
                    break
            else:
                return point
            newest_failures = newest_failures or failures
            logger.warning(
                "The backup of %s cannot be restored, because of %s.", point, failures
            )
        if newest_failures:
            raise ValueError(
                f"No backup in {self.directory} can be restored on every worker. "
                "Expected: the model that was saved, built, and files that can be "
                f"read. Received: {newest_failures}"
            )
        return None

    def _read_through(self, point: Point) -> None:
        """Raises an error if a file of this point cannot be read to its end."""
        with np.load(backups.point_folder(self._folder, point) / _RUN_STATE) as saved:
            self._run_state = dict(saved)

        def read(_, item):
            if isinstance(item, h5py.Dataset):
                item[()]

        with h5py.File(backups.weights_file(self._folder, point)) as file:
            file.visititems(read)

    def _restore(self, point: Point) -> None:
        prepare_to_resume(self.model, *point)
        self.model.load_weights(backups.weights_file(self._folder, point))
        if not self._state.assign(self._run_state):
            logger.warning(
                "The backup of %s has other random states than the model: dropout and "
                "other random layers draw other numbers than without the interruption.",
                point,
            )

    def _common_points(self) -> list[Point]:
        """Returns the points that all workers have.

        Raises:
            ValueError: On all workers, if the folders do not belong together.
        """
        outcome = self._workers.run(self._describe_points, "backup/read")
        if outcome.failures:
            raise ValueError(
                f"The backup in {self.directory} cannot be read on every worker. "
                "Mend the folder or remove it to start at the beginning. Received: "
                f"{outcome.failures}"
            ) from outcome.error
        # For each worker, its points, their origins, and whether they are the first.
        found = [
            [(Point(*point), Origin(*origin), first) for point, origin, first in points]
            for points in outcome.values
        ]
        self._check_origins([{origin for _, origin, _ in points} for points in found])
        common = set.intersection(*({p for p, *_ in points} for points in found))
        # The first backup may be on some workers alone: then training starts anew.
        if not common and not all(first for points in found for *_, first in points):
            have = {rank: [str(p) for p, *_ in ps] for rank, ps in enumerate(found)}
            raise ValueError(
                "No backup is whole on every worker. Bring back the missing folders, "
                f"or remove {self.directory} to start at the beginning. Received: "
                f"backups by worker={have}"
            )
        return [*common]

    def _check_origins(self, origins):
        num_workers = self._origin.num_workers
        counts = {origin.num_workers for of_worker in origins for origin in of_worker}
        if counts - {num_workers}:
            saved = max(counts - {num_workers})
            raise ValueError(
                f"The backup in {self.directory} is of {saved} workers, this training "
                f"has {num_workers}. Convert it with: python -m tfgradcomp.reshard "
                f"{self.directory} --workers {num_workers} --out NEW"
            )
        writers = {rank: sorted(o.rank for o in os) for rank, os in enumerate(origins)}
        if any(ranks not in ([], [rank]) for rank, ranks in writers.items()):
            raise ValueError(
                f"Folders in {self.directory} were exchanged: each must be of the "
                "worker in its name. Bring back those of every worker, or remove them "
                "all to start at the beginning. Received: the ranks that wrote the "
                f"folders of each worker={writers}"
            )

    def _describe_points(self) -> list[tuple[Point, Origin, bool]]:
        """Returns point, origin and `is_first` of each readable point, in order."""
        described = []
        for point in backups.points_in(self._folder)[-_MOST_POINTS:]:
            source = backups.point_folder(self._folder, point)
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(h5py.File(source / backups.WEIGHTS))
                    stack.enter_context(np.load(source / _RUN_STATE))
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                logger.warning("%s cannot be read and is left out: %s", source, error)
                continue
            origin = backups.read_origin(self._folder, point)
            described.append((point, origin, backups.is_first(self._folder, point)))
        return described
