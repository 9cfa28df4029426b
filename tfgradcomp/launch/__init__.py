"""Launcher of a multi-worker training run on one machine.

Standard library only, because importing TensorFlow would cost seconds and memory. Linux
only: process sessions, core affinity and the parent-death signal are used freely. Apart
from it stands `virtual_workers.py`, which starts no processes.
"""

from tfgradcomp.launch.launcher import main

__all__ = ["main"]
