"""Keras' saving when all workers are given one path, as one script gives them.

Keras writes in place, so that workers on one disk lock each other out of a file or mix
what they write. Under a multi-worker strategy `save` and `save_weights` write beside
the path and rename, and `BackupAndRestore` takes a folder a worker.
"""

from __future__ import annotations

import os

from tfgradcomp.compat.strategy import is_multi_worker, process_of

_BACKUP_PATHS = (
    "backup_dir",
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


def save(original, model, filepath, overwrite=True, **kwargs):
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


def checkpoint(original, callback, *args, **kwargs):
    """Replaces `ModelCheckpoint._save_model`: all may create its folder at once."""
    folder = os.path.dirname(os.fspath(callback.filepath))
    if folder and not any(sign in folder for sign in ("{", "://")):
        os.makedirs(folder, exist_ok=True)
    return original(callback, *args, **kwargs)


def begin_backup(original, callback, *args, **kwargs):
    """Replaces `BackupAndRestore.on_train_begin`: a folder a worker."""
    strategy = callback.model.distribute_strategy
    if is_multi_worker(strategy):
        common = callback.backup_dir
        own = os.path.join(common, f"worker-{process_of(strategy)[0]}")
        if os.path.basename(common) != os.path.basename(own):
            for name in _BACKUP_PATHS:
                setattr(callback, name, getattr(callback, name).replace(common, own, 1))
    return original(callback, *args, **kwargs)
