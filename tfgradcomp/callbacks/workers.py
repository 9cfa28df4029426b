"""Messages between the callbacks of the workers.

An error of one worker that the others do not know of would let them wait in their next
collective for ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_TEXT_BYTES = 504


class Failure(NamedTuple):
    """An error of one worker.

    Attributes:
        text: The error, with the rank of the worker in front.
        is_io: Whether it is an error of reading or writing.
    """

    text: str
    is_io: bool

    def __str__(self):
        return self.text


class Workers:
    """The workers of a training, which all call the same methods in the same order.

    Args:
        hosts: The collectives between the processes; None where there is one.
    """

    def __init__(self, hosts: Any):
        self._hosts = hosts
        self.rank = hosts.process_index if hosts else 0
        self.num_workers = hosts.num_workers if hosts else 1

    def gather(self, row: list[int], call_site: str) -> np.ndarray:
        """Returns the rows of all workers, `[N, len(row)]`."""
        if not self._hosts:
            return np.array([row])
        return self._hosts.gather(tf.constant(row, tf.int64), call_site).numpy()

    def failures(self, error: BaseException | None, call_site: str) -> list[Failure]:
        """Returns the errors of all workers.

        Args:
            error: This worker's error; None if all went well.
            call_site: Name of the call.
        """
        if error is None:
            kind, text = 0, ""
        else:
            # HDF5 raises RuntimeError where it cannot write what it still holds.
            kind = 1 if isinstance(error, (OSError, RuntimeError)) else 2
            text = f"{type(error).__name__}: {error}"
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        rows = self.gather([kind, *np.frombuffer(data, np.int64).tolist()], call_site)
        return [
            Failure(f"worker {rank}: {_text_of(row[1:])}", is_io=row[0] == 1)
            for rank, row in enumerate(rows)
            if row[0]
        ]


def _text_of(numbers: np.ndarray) -> str:
    return numbers.astype(np.int64).tobytes().rstrip(b"\0").decode(errors="ignore")
