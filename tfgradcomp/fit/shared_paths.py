"""Keras' saving where one script gives all workers the same path.

Keras writes in place, so workers on one disk lock each other out of a file or mix their
bytes. Under a multi-worker strategy `save` and `save_weights` write a file beside the
path and rename it, and `BackupAndRestore` uses one folder per worker.
"""

from __future__ import annotations

import os

import keras

from tfgradcomp.collectives.processes import process_of
from tfgradcomp.compat.replace import replace
from tfgradcomp.compat.saving import move_backup, replace_checkpoint
from tfgradcomp.compat.strategy import is_multi_worker


def share_paths() -> None:
    """Makes Keras' saving safe for workers that share their paths."""
    replace(keras.Model, "save", _save)
    replace(keras.Model, "save_weights", _save)
    replace_checkpoint(_checkpoint)
    replace(keras.callbacks.BackupAndRestore, "on_train_begin", _begin_backup)


def _save(original, model, filepath, overwrite=True, **kwargs):
    """Replaces `Model.save` and `Model.save_weights`."""
    path = os.fspath(filepath)
    strategy = model.distribute_strategy
    in_place = not overwrite or "://" in path or not path.endswith((".keras", ".h5"))
    if in_place or not is_multi_worker(strategy):
        return original(model, filepath, overwrite=overwrite, **kwargs)
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".worker-{process_of(strategy)[0]}-{name}")
    try:
        result = original(model, unfinished, overwrite=True, **kwargs)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)
    return result


def _checkpoint(original, callback, *args, **kwargs):
    """Creates the folder of a `ModelCheckpoint`, which all may create at once."""
    folder = os.path.dirname(os.fspath(callback.filepath))
    if folder and not any(sign in folder for sign in ("{", "://")):
        os.makedirs(folder, exist_ok=True)
    return original(callback, *args, **kwargs)


def _begin_backup(original, callback, *args, **kwargs):
    """Replaces `BackupAndRestore.on_train_begin`: each worker has its own folder."""
    strategy = callback.model.distribute_strategy
    if is_multi_worker(strategy):
        worker = f"worker-{process_of(strategy)[0]}"
        if os.path.basename(callback.backup_dir) != worker:
            move_backup(callback, os.path.join(callback.backup_dir, worker))
    return original(callback, *args, **kwargs)
