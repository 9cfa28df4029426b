"""Keras callbacks, under the names that users import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgradcomp import lazy

if TYPE_CHECKING:
    from tfgradcomp.callbacks.backup import BackupAndRestore
    from tfgradcomp.callbacks.monitor import CompressionMonitor
    from tfgradcomp.callbacks.recorder import Timeline

__all__ = ["BackupAndRestore", "CompressionMonitor", "Timeline"]

# Imported at their first use: merging timelines needs no TensorFlow.
__getattr__ = lazy.attributes(
    __name__,
    {
        "BackupAndRestore": "tfgradcomp.callbacks.backup",
        "CompressionMonitor": "tfgradcomp.callbacks.monitor",
        "Timeline": "tfgradcomp.callbacks.recorder",
    },
)
