"""A round of the hub: what waits for it, and what is left of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tfgradcomp.core.arguments import check_integer


class Rules(NamedTuple):
    """Rules of a training.

    Attributes:
        rounds: Number of rounds of the whole training.
        deadline: Seconds after which a round closes without those who have not come.
        quorum: Least number of payloads that close a round.
        replies_kept: Greatest number of replies that are kept for clients who missed
            them.
        norm_limit: A payload whose norm is more than so many times the median is left
            out.
        most_clients: Greatest number of clients that may ever join.
    """

    rounds: int
    deadline: float
    quorum: int = 1
    replies_kept: int = 32
    norm_limit: float = 10.0
    most_clients: int = 1000


def check_rounds(rounds: int, deadline: float) -> None:
    """Raises a `ValueError` unless there are rounds, and time for them."""
    check_integer("rounds", rounds, 1)
    if not deadline > 0:
        raise ValueError(f"deadline must be positive. Received: deadline={deadline!r}")


class Waiting(NamedTuple):
    """A payload that has come and is in no round yet."""

    name: str
    life: int
    sequence: int
    examples: float
    payload: bytes
    statistics: np.ndarray
    norm: float


class Round(NamedTuple):
    """A closed round.

    Attributes:
        round: Its number, from 1.
        counted: Names of the clients whose payloads it counted, in order.
        carried: Names of the clients that were awaited and did not come in time.
        left_out: Names of the clients whose payloads were left out.
        seconds: Seconds since the round before.
        payload_bytes: Bytes of the longest payload.
        reply_bytes: Bytes of the reply.
        payload_norm: Median of the norms of the payloads that were counted.
    """

    round: int
    counted: tuple[str, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float
    payload_bytes: int
    reply_bytes: int
    payload_norm: float

    def __str__(self):
        up, down = self.payload_bytes / 1e3, self.reply_bytes / 1e3
        late = f"; carried to the next: {', '.join(self.carried)}" * bool(self.carried)
        return (
            f"{len(self.counted)} clients, {up:.1f} kB up and {down:.1f} kB down a "
            f"client, {self.seconds:.1f} s{late}"
        )


def too_long(
    queue: Iterable[Waiting], norms: Sequence[float], limit: float
) -> list[tuple[Waiting, str]]:
    """Returns the payloads that are much longer than others, each with a sentence.

    Args:
        queue: The payloads of a round.
        norms: The norms of payloads before.
        limit: Times the median of all of them.
    """
    waiting = [*queue]
    known = [*norms, *(each.norm for each in waiting)]
    median = statistics.median(known)
    # Two payloads do not say which of them is too long.
    if len(known) < 3 or not median:
        return []
    return [
        (
            each,
            f"the norm of its payload, {each.norm:.3g}, is more than {limit:g} times "
            f"the median, {median:.3g}",
        )
        for each in waiting
        if each.norm > limit * median
    ]


def weighted_mean(rows: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Returns the mean of float32 arrays, summed in float64, in order."""
    pairs = zip(weights, rows, strict=True)
    total = sum(weight * row.astype(np.float64) for weight, row in pairs)
    return np.asarray(total / sum(weights), np.float32)
