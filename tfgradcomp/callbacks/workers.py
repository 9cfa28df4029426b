"""Messages between the callbacks of the workers.

If one worker alone raised an error, the other workers would wait in their next
collective for ever. So all workers exchange their errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import across_hosts

_TEXT_BYTES = 504


class Outcome(NamedTuple):
    """Outcome of an action that every worker has run.

    Attributes:
        value: This worker's result; None if it raised.
        error: This worker's error; None if it raised none.
        failures: The errors of all workers, by rank; empty if all succeeded.
        is_io: True if all these errors are of reading or writing.
    """

    value: Any
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
        """Runs an action on every worker, and exchanges the errors.

        Args:
            action: The action, local to a worker.
            call_site: Name of the exchange.
            *args: Arguments of the action.
        """
        value, error, kind, text = None, None, 0, ""
        try:
            value = action(*args)
        except Exception as raised:
            error = raised
            # HDF5 raises RuntimeError if it cannot write its buffers.
            kind = 1 if isinstance(error, (OSError, RuntimeError)) else 2
            text = f"{type(error).__name__}: {error}"
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        rows = self.gather([kind, *np.frombuffer(data, np.int64).tolist()], call_site)
        failures = [
            f"worker {rank}: {_text_of(row[1:])}"
            for rank, row in enumerate(rows)
            if row[0]
        ]
        return Outcome(value, error, ", ".join(failures), bool(np.all(rows[:, 0] < 2)))


def _text_of(numbers: np.ndarray) -> str:
    return numbers.astype(np.int64).tobytes().rstrip(b"\0").decode(errors="ignore")
