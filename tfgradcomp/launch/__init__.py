"""Launcher of a multi-worker training run on one machine.

Uses the standard library alone, because importing TensorFlow costs seconds and memory
(`virtual_workers.py`, which starts no processes, is the exception). Requires Linux:
process sessions, core affinity and the parent-death signal.
"""

from tfgradcomp.launch.launcher import main

__all__ = ["main"]
