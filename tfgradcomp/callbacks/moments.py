"""The moments of a step as a row of numbers, and the phases between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.engine.probe import ObservedStep

# The moments of a bucket that there is room for: four, and a dozen collectives.
_MOST = 28
_HEADER = 4

COLLECTIVES = ("gather", "all_to_all", "sum", "max")


class Phase(NamedTuple):
    """A part of a bucket's exchange, in seconds since 1970."""

    name: str
    begin: float
    end: float


class BucketTimes(NamedTuple):
    """The times of one bucket in one step.

    Attributes:
        name: Name of the bucket.
        phases: Its phases, one after the other.
    """

    name: str
    phases: list[Phase]


class StepTimes(NamedTuple):
    """The times of one step, in seconds since 1970.

    Attributes:
        step: The number of updates applied before it.
        begin: When the graph of the step began to run.
        ready: When the last gradient was there.
        exchanged: When the last reply was decoded.
        applied: When the weights were updated.
        buckets: The buckets, in their order.
    """

    step: int
    begin: float
    ready: float
    exchanged: float
    applied: float
    buckets: list[BucketTimes]


class Moments:
    """The layout of rows that hold the moments of a step, float64 `[width]`.

    The names of the moments are known when a step has been traced, and are the same in
    every trace of its kind.

    Attributes:
        width: Numbers in a row.
    """

    def __init__(self, bucket_names: list[str]):
        self._bucket_names = bucket_names
        self._names: dict[bool, list[list[str]]] = {}
        self.width = _HEADER + _MOST * len(bucket_names)

    def row(self, step: ObservedStep) -> tf.Tensor:
        """Returns the moments of a step, in the graph."""
        self._names[step.is_uncompressed_step] = [
            [name for name, _ in bucket.timestamps[:_MOST]] for bucket in step.buckets
        ]
        zero = tf.zeros([], tf.float64)
        row = [
            tf.cast(step.context.step, tf.float64),
            tf.constant(float(step.is_uncompressed_step), tf.float64),
            step.begin,
            step.applied,
        ]
        for bucket in step.buckets:
            times = [time for _, time in bucket.timestamps[:_MOST]]
            row += times + [zero] * (_MOST - len(times))
        return tf.stack(row)

    def read(self, row: np.ndarray) -> StepTimes | None:
        """Returns what a row says; None if it holds no times."""
        step, is_uncompressed_step, begin, applied = row[:_HEADER].tolist()
        if not begin:
            return None
        rows = row[_HEADER:].reshape([-1, _MOST]).tolist()
        names = self._names[bool(is_uncompressed_step)]
        buckets = [
            BucketTimes(bucket, _phases([*zip(own, times, strict=False)]))
            for bucket, own, times in zip(self._bucket_names, names, rows, strict=True)
        ]
        ready = max(bucket.phases[0].begin for bucket in buckets)
        exchanged = max(bucket.phases[-1].end for bucket in buckets)
        begin, applied = min(begin, ready), max(applied, exchanged)
        return StepTimes(int(step), begin, ready, exchanged, applied, buckets)


def _phases(moments: list[tuple[str, float]]) -> list[Phase]:
    """Returns the phases between the moments of a bucket."""
    phases: list[Phase] = []
    _, last = moments[0]
    for name, time in moments[1:]:
        # Clocks of two cores may differ a little; the program's order is what counts.
        begin, last = last, max(last, time)
        before = [phase.name for phase in phases]
        kind, _, collective = name.partition(" ")
        if kind == "leave":
            phase = collective
        elif name == "flattened":
            phase = "flatten"
        elif kind == "enter" and before[-1:] == ["all_to_all"]:
            phase = "server"
        elif name == "exchanged":
            phase = "decode" if "server" in before else "server and decode"
        else:
            phase = "encode"
        phases.append(Phase(phase, begin, last))
    return phases


def milliseconds(times: StepTimes, names: Iterable[str]) -> float:
    """Returns how long phases of some names took, over all buckets."""
    chosen = {*names}
    seconds = sum(
        phase.end - phase.begin
        for bucket in times.buckets
        for phase in bucket.phases
        if phase.name in chosen
    )
    return 1000 * seconds


def hidden_share(times: StepTimes) -> float | None:
    """Returns the part of the collectives' time before the last gradient was ready.

    None if the collectives took no time.
    """
    calls = [
        phase
        for bucket in times.buckets
        for phase in bucket.phases
        if phase.name in COLLECTIVES
    ]
    total = sum(phase.end - phase.begin for phase in calls)
    hidden = sum(max(0.0, min(phase.end, times.ready) - phase.begin) for phase in calls)
    return hidden / total if total else None
