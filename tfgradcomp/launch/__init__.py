"""Starting a multi-worker training run; needs no TensorFlow."""

from tfgradcomp.launch.launcher import main

__all__ = ["main"]
