"""Keras' saving: the parts of its callbacks and of a model's walk without a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable

from tfgradcomp.compat.replace import replace

_BACKUP_PATHS = (
    "backup_dir",
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


def replace_checkpoint(function: Callable) -> None:
    """Makes `ModelCheckpoint` save by a function.

    The callback creates its folder there, with no public hook before it.

    Args:
        function: Called as `function(original, callback, *args, **kwargs)`.
    """
    replace(keras.callbacks.ModelCheckpoint, "_save_model", function)


def move_backup(callback: keras.callbacks.BackupAndRestore, folder: str) -> None:
    """Makes a `BackupAndRestore` use another folder.

    Setting the public `backup_dir` would leave the paths of the files as they are.
    """
    before = callback.backup_dir
    for name in _BACKUP_PATHS:
        setattr(callback, name, getattr(callback, name).replace(before, folder, 1))


def saved_children(item: Any) -> Iterable[tuple[str, Any]] | None:
    """Returns names and values of the attributes that Keras saves; None if it has none.

    Keras' files of weights have these names, but Keras does not list them.
    """
    return saving_lib._walk_saveable(item) if isinstance(item, KerasSaveable) else None
