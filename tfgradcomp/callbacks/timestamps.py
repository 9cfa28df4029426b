"""The timestamps of a step as a row of numbers, and the phases between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.engine.probe import ObservedStep

# Places for the timestamps of a bucket: four, and those of a dozen collectives.
_MOST = 28
_HEADER = 4

COLLECTIVES = ("gather", "all_to_all", "sum", "max")


class Phase(NamedTuple):
    """A part of a bucket's exchange, in seconds since 1970."""

    name: str
    begin: float
    end: float


class BucketTimes(NamedTuple):
    """Name of a bucket, and its phases in one step, one after the other."""

    name: str
    phases: list[Phase]


class StepTimes(NamedTuple):
    """The times of one step, in seconds since 1970.

    Attributes:
        step: Number of updates applied before the step.
        begin: Time at which the graph of the step began to run.
        ready: Time at which the last gradient was computed.
        exchanged: Time at which the last reply was decoded.
        applied: Time at which the weights were updated.
        buckets: The buckets, in their order.
    """

    step: int
    begin: float
    ready: float
    exchanged: float
    applied: float
    buckets: list[BucketTimes]

    def phases(self, names: Iterable[str]) -> list[Phase]:
        """Returns the phases of all buckets that have one of some names."""
        phases = [phase for bucket in self.buckets for phase in bucket.phases]
        return [phase for phase in phases if phase.name in names]

    def milliseconds(self, names: Iterable[str]) -> float:
        """Returns the sum of the durations of phases, over all buckets."""
        return 1000 * sum(phase.end - phase.begin for phase in self.phases(names))

    @property
    def hidden_share(self) -> float | None:
        """The part of the collectives' time before the last gradient was computed.

        None if the collectives took no time.
        """
        calls = self.phases(COLLECTIVES)
        total = sum(call.end - call.begin for call in calls)
        hidden = sum(max(0.0, min(call.end, self.ready) - call.begin) for call in calls)
        return hidden / total if total else None


class TimestampRows:
    """Layout of the rows with the timestamps of a step, float64 `[width]`.

    The names of the timestamps become known when a step is traced. They are the same in
    every trace of an uncompressed step, and in every trace of a compressed step.

    Args:
        bucket_names: Names of the buckets.

    Attributes:
        width: Numbers in a row.
    """

    def __init__(self, bucket_names: list[str]):
        self._bucket_names = bucket_names
        self._names: dict[bool, list[list[str]]] = {}
        self.width = _HEADER + _MOST * len(bucket_names)

    def row(self, step: ObservedStep) -> tf.Tensor:
        """Returns the row of a step, in its graph."""
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
        """Returns the times in a row; None if the row is empty."""
        step, is_uncompressed_step, begin, applied = row[:_HEADER].tolist()
        if not begin:
            return None
        rows = row[_HEADER:].reshape([-1, _MOST]).tolist()
        names_of_buckets = self._names[bool(is_uncompressed_step)]
        buckets = [
            BucketTimes(bucket, _phases([*zip(names, times, strict=False)]))
            for bucket, names, times in zip(
                self._bucket_names, names_of_buckets, rows, strict=True
            )
        ]
        ready = max(bucket.phases[0].begin for bucket in buckets)
        exchanged = max(bucket.phases[-1].end for bucket in buckets)
        begin, applied = min(begin, ready), max(applied, exchanged)
        return StepTimes(int(step), begin, ready, exchanged, applied, buckets)


def _phases(timestamps: list[tuple[str, float]]) -> list[Phase]:
    """Returns the phases between the timestamps of a bucket."""
    phases: list[Phase] = []
    _, last = timestamps[0]
    for name, time in timestamps[1:]:
        # Clocks of two cores may differ slightly; the program's order is reliable.
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
