"""Keras callbacks, under the names that users import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgradcomp.callbacks.backup import BackupAndRestore
    from tfgradcomp.callbacks.monitor import CompressionMonitor
    from tfgradcomp.callbacks.recorder import Timeline

__all__ = ["BackupAndRestore", "CompressionMonitor", "Timeline"]

# Imported at their first use: what merges timelines needs no TensorFlow.
_ORIGINS = {
    "BackupAndRestore": "tfgradcomp.callbacks.backup",
    "CompressionMonitor": "tfgradcomp.callbacks.monitor",
    "Timeline": "tfgradcomp.callbacks.recorder",
}


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ORIGINS[name]), name)
