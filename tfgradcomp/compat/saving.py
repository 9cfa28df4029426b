"""Keras' saving: the parts of its callbacks and of a model's walk without a name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
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

replace_checkpoint = partial(replace, keras.callbacks.ModelCheckpoint, "_save_model")
"""Makes `ModelCheckpoint` save by `function(original, callback, *args, **kwargs)`.

The callback creates its folder there, with no public hook before it.
"""


def move_backup(callback: keras.callbacks.BackupAndRestore, folder: str) -> None:
    """Makes a `BackupAndRestore` use another folder.

    Setting the public `backup_dir` would leave the paths of the files as they are.
    """
    before = callback.backup_dir
    for name in _BACKUP_PATHS:
        setattr(callback, name, getattr(callback, name).replace(before, folder, 1))


def saved_children(item: Any) -> Iterable[tuple[str, Any]] | None:
    """Returns names and values of attributes, as in Keras' files; None if not saved."""
    return saving_lib._walk_saveable(item) if isinstance(item, KerasSaveable) else None
