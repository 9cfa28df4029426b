"""Keras callbacks, under the name that users import."""

from tfgradcomp.monitoring.callbacks import BackupAndRestore

__all__ = ["BackupAndRestore"]
