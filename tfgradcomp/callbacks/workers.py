"""Messages between the callbacks of the workers.

If one worker alone raised an error, the other workers would wait in their next
collective for ever. So all workers exchange their errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import across_hosts

_MESSAGE_BYTES = 4096
# Largest number of characters of an error, each of up to twelve bytes in JSON.
_ERROR_CHARACTERS = 320


class Outcome(NamedTuple):
    """Outcome of an action that every worker has run.

    Attributes:
        values: The results of all workers, by rank, as JSON has them.
        error: This worker's error; None if it raised none.
        failures: The errors of all workers, by rank; empty if all succeeded.
        is_io: True if all these errors are of reading or writing.
    """

    values: list
    error: Exception | None
    failures: str
    is_io: bool


class Workers:
    """The workers of a training, which all call the same methods in the same order.

    Args:
        model: The model in training.

    Attributes:
        rank: Index of this worker.
        num_workers: Number of worker processes.
    """

    def __init__(self, model: keras.Model):
        self._hosts = across_hosts(model.distribute_strategy)
        self.rank = self._hosts.process_index if self._hosts else 0
        self.num_workers = self._hosts.num_workers if self._hosts else 1

    def gather(self, row: list[int], call_site: str) -> np.ndarray:
        """Returns the rows of all workers, `[N, len(row)]`."""
        if not self._hosts:
            return np.array([row])
        return self._hosts.gather(tf.constant(row, tf.int64), call_site).numpy()

    def run(self, action: Callable, call_site: str, *args: Any) -> Outcome:
        """Runs an action on every worker, and exchanges results and errors.

        Args:
            action: The action, local to a worker; returns a short value for JSON.
            call_site: Name of the exchange.
            *args: Arguments of the action.
        """
        error = None
        try:
            message = ["done", action(*args)]
        except Exception as raised:
            error = raised
            # HDF5 raises RuntimeError if it cannot write its buffers.
            is_io = isinstance(error, (OSError, RuntimeError))
            text = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            message = ["I/O error" if is_io else "error", text]
        data = json.dumps(message).encode().ljust(_MESSAGE_BYTES)
        rows = self.gather(np.frombuffer(data, np.int64).tolist(), call_site)
        messages = [json.loads(row.astype(np.int64).tobytes()) for row in rows]
        kinds, values = zip(*messages, strict=True)
        failures = [
            f"worker {rank}: {text}"
            for rank, (kind, text) in enumerate(messages)
            if kind != "done"
        ]
        return Outcome([*values], error, ", ".join(failures), "error" not in kinds)
