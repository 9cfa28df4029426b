"""Keras callback that saves and resumes training on several workers."""

from __future__ import annotations

import contextlib
import shutil
import sys
import zipfile

import h5py
import keras
import numpy as np

from tfgradcomp.callbacks.workers import Failure, Workers
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Point
from tfgradcomp.collectives import across_hosts
from tfgradcomp.core.logging import logger
from tfgradcomp.fit.preemption import Preemption
from tfgradcomp.fit.resume import prepare_to_resume
from tfgradcomp.fit.run_state import RunState
from tfgradcomp.fit.statistics import digest_of_weights

PREEMPTED = 79
"""Exit code of workers that were told to end and have saved: start them again."""

# What no file of weights has. Dropout would differ after a restart without it.
_REST = "random.npz"
# Those that are kept, and one that other workers may not have.
_POINTS = backups.KEPT + 1


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes `fit` after an interruption, each worker from a folder of its own.

    At the end of each epoch, or every `save_freq` batches, each worker writes its
    weights, its optimizer's state, residuals included, and the random states of its
    layers to `directory/worker-<rank>/epoch-<n>`. A folder appears when it is complete,
    and the last two are kept. At the next start all workers agree on the newest one
    that every one of them has and can read, and resume there; batches that an epoch had
    already taken are skipped. With the same number of workers, and data that is the
    same in every epoch, the result has the same bits as without the interruption, also
    under another transport or with buckets of another size.

    A backup that cannot be written, as on a full disk, is a warning on all workers:
    training goes on, and the older backup stays.

    SIGTERM to any worker, as schedulers send it before they take a machine away, makes
    all of them end the step, save, and exit with code 79 (`PREEMPTED`). In a validation
    they save at once and exit when it is over. A second SIGTERM ends a worker at once.
    A program that handles SIGTERM by itself keeps its own handler.

    Args:
        directory: Folder on a disk of each machine, or on one that all share.
        delete_checkpoint: True: the folders are removed when training has ended well.
        save_freq: `"epoch"`, or the number of batches between two backups.

    Raises:
        ValueError: On all workers, at the start of training: if the model is not built,
            the folders are of another number of workers or were exchanged, or if no
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
            raise ValueError(f"directory must be a path. Received: {directory!r}")
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
        self._workers = Workers(across_hosts(self.model.distribute_strategy))
        self._origin = backups.Origin(self._workers.rank, self._workers.num_workers)
        self._folder = backups.worker_folder(self.directory, self._origin.rank)
        self._state = RunState(self.model)
        self._epoch = self._batch = self._unsaved_batches = 0
        self._has_trained = False
        self._rest: dict[str, np.ndarray] = {}
        self._newest = self._restore_newest(self._common_points())
        self._preemption = Preemption(self.model)
        self._preemption.begin()

    def on_epoch_begin(self, epoch, logs=None):
        """Goes on with the metrics of an epoch that was interrupted."""
        self._epoch, self._batch = epoch, 0
        if self._rest and self._newest and self._newest.batch:
            self._batch = self._newest.batch
            self._state.assign_metrics(self._rest)
        self._rest = {}
        if told := self._told():
            self._end(told)

    def on_train_batch_end(self, batch, logs=None):
        """Writes the state of this worker, if it is time."""
        self._unsaved_batches += batch + 1 - self._batch
        self._batch, self._has_trained = batch + 1, True
        told = self._told()
        steps = (self.params or {}).get("steps")
        if steps is not None and self._batch >= steps:
            # The end of the epoch follows, and is the better place to go on from.
            return
        if self._is_due():
            self._save()
        if told:
            self._end(told)

    def on_test_batch_end(self, batch, logs=None):
        """Writes the state before a validation that may not come to its end."""
        if self._batch and self._told():
            self._epoch, self._batch = self._epoch + 1, 0
            self._save()
            # Once more when the epoch has ended.
            self._unsaved_batches = 1

    def on_epoch_end(self, epoch, logs=None):
        """Writes the state of this worker."""
        self._epoch, self._batch = epoch + 1, 0
        # Nothing is trained where the last batch was saved and its epoch is resumed.
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

    def _told(self) -> list[int]:
        """Returns the workers that were told to end, the same on all workers."""
        return self._preemption.workers() if self._preemption else []

    def _end(self, told: list[int]) -> None:
        """Saves and ends the process, because some workers were told to end."""
        if self._unsaved_batches:
            self._save()
        logger.warning(
            "SIGTERM has come to workers %s: all end with code %d, the newest backup "
            "is that of %s.",
            *(told, PREEMPTED, self._newest or "no moment"),
        )
        sys.exit(PREEMPTED)

    def _save(self) -> None:
        """Writes this moment, which counts if all workers could.

        Raises:
            RuntimeError: On all workers, if one had another error than of writing.
        """
        point, error = Point(self._epoch, self._batch), None
        self._unsaved_batches = 0

        def save(folder):
            self.model.save_weights(folder / backups.WEIGHTS)
            (folder / backups.DIGEST).write_text(digest_of_weights(self.model))
            np.savez(folder / _REST, allow_pickle=False, **self._state.read())

        try:
            is_first = self._newest is None
            backups.write(self._folder, point, self._origin, save, is_first)
        except Exception as raised:
            error = raised
        failures = self._workers.failures(error, "backup/written")
        if not failures:
            self._newest = point
            with contextlib.suppress(OSError):
                backups.drop_old(self._folder)
            return
        # It would never be one that all workers have.
        backups.remove(self._folder, point)
        message = (
            f"The backup of {point} is not written, because of "
            f"{', '.join(map(str, failures))}. "
        )
        if not all(failure.is_io for failure in failures):
            raise RuntimeError(message) from error
        logger.warning(
            "%sTraining goes on; the newest backup is that of %s.",
            *(message, self._newest or "no moment"),
        )

    def _restore_newest(self, points: list[Point]) -> Point | None:
        """Restores the newest point that all workers can read; None if there is none.

        Args:
            points: Those that all workers have.

        Raises:
            ValueError: On all workers, if none can be read.
        """
        first: list[Failure] = []
        for point in sorted(points, reverse=True):
            # Loading may be a meeting of all workers, which each has to be ready for.
            for action in (self._read_through, self._restore):
                error = None
                try:
                    action(point)
                except Exception as raised:
                    error = raised
                failures = self._workers.failures(error, "backup/restored")
                if failures:
                    break
            else:
                return point
            first = first or failures
            logger.warning(
                "The backup of %s cannot be restored, because of %s.",
                *(point, ", ".join(map(str, failures))),
            )
        if first:
            raise ValueError(
                f"No backup in {self.directory} can be restored on every worker. "
                "Expected: the model that was saved, built, and files that can be "
                f"read. Received: {', '.join(map(str, first))}"
            )
        return None

    def _read_through(self, point: Point) -> None:
        """Raises an error if a file of this point cannot be read to its end."""
        source = backups.point_folder(self._folder, point)
        with np.load(source / _REST) as saved:
            self._rest = dict(saved)

        def read(_, item):
            if isinstance(item, h5py.Dataset):
                item[()]

        with h5py.File(source / backups.WEIGHTS) as file:
            file.visititems(read)

    def _restore(self, point: Point) -> None:
        source = backups.point_folder(self._folder, point)
        prepare_to_resume(self.model, *point)
        self.model.load_weights(source / backups.WEIGHTS)
        if not self._state.assign(self._rest):
            logger.warning(
                "The backup of %s has other random states than the model: dropout and "
                "the like draw other numbers than without the interruption.",
                point,
            )

    def _common_points(self) -> list[Point]:
        """Returns the points that all workers have.

        Raises:
            ValueError: On all workers, if the folders do not belong together.
        """
        row, error = [], None
        try:
            for point in self._readable_points():
                row += [*point, *backups.read_origin(self._folder, point)]
                row.append(backups.is_first(self._folder, point))
        except Exception as raised:
            row, error = [], raised
        failures = self._workers.failures(error, "backup/read")
        if failures:
            raise ValueError(
                f"The backup in {self.directory} cannot be read on every worker. "
                "Mend the folder or remove it to start at the beginning. Received: "
                f"{', '.join(map(str, failures))}"
            ) from error
        row += [0] * (5 * _POINTS - len(row))
        gathered = self._workers.gather(row, "backup").reshape([-1, _POINTS, 5])
        # By workers, the origins of the points that each of them has.
        found = [
            {Point(*r[:2]): backups.Origin(*r[2:4]) for r in rows if r[3]}
            for rows in gathered.tolist()
        ]
        self._check_origins(found)
        common = set.intersection(*map(set, found))
        # The first backup may have reached some workers only; there is none before it.
        later = gathered[(gathered[..., 3] > 0) & (gathered[..., 4] == 0)]
        if not common and len(later):
            have = {rank: [*map(str, own)] for rank, own in enumerate(found)}
            raise ValueError(
                "No backup is whole on every worker. Bring back the missing folders, "
                f"or remove {self.directory} to start at the beginning. Received: "
                f"backups by worker={have}"
            )
        return [*common]

    def _check_origins(self, found):
        num_workers = self._origin.num_workers
        origins = {rank: {*points.values()} for rank, points in enumerate(found)}
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

    def _readable_points(self) -> list[Point]:
        """Returns the points that this worker has and can read, the newest last."""
        found = []
        for point in backups.points_in(self._folder)[-_POINTS:]:
            source = backups.point_folder(self._folder, point)
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(h5py.File(source / backups.WEIGHTS))
                    stack.enter_context(np.load(source / _REST))
                found.append(point)
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                logger.warning("%s cannot be read and is left out: %s", source, error)
        return found
