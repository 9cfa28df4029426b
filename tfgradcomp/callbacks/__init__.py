"""Keras callbacks, under the name that users import."""

from tfgradcomp.callbacks.backup import BackupAndRestore

__all__ = ["BackupAndRestore"]
