"""Recording of the variables that operations read."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager.record import VariableWatcher


class VariableReads:
    """Records the trainable TensorFlow variables that are read between start and stop.

    The public `tf.GradientTape` shows them too, but also keeps all intermediate values.
    Recordings may be nested: each active recording of a thread sees every read.
    """

    _watcher: VariableWatcher

    def start(self) -> None:
        """Begins a new recording."""
        self._watcher = VariableWatcher()
        self._watcher.__enter__()

    def stop(self) -> tuple[tf.Variable, ...]:
        """Ends the recording and returns the variables that were read in it."""
        self._watcher.__exit__(None, None, None)
        return self._watcher.watched_variables()
