"""Keras callback that writes a timeline of some steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.callbacks import timeline
from tfgradcomp.callbacks.observing_callback import ObservingCallback
from tfgradcomp.callbacks.timestamps import StepTimes, TimestampRows
from tfgradcomp.callbacks.workers import Workers
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.probe import ObservedStep

_ROUNDS = 15
# A worker that waits for others in the collective logs this name.
_CALL_SITE = "Timeline, which all workers need if one has it"


class Timeline(ObservingCallback):
    """Writes a timeline of each worker and bucket, in Chrome's trace format.

    For each step of a range, the timeline of a worker shows the step, its forward and
    backward pass and the update of the weights. The timeline of a bucket shows
    flattening, encoding, each collective, the server and decoding. The server is a
    phase of its own with `"sharded"` alone; elsewhere it is a part of decoding.

    With several processes, each writes its own file, `trace.worker-<rank>.json`; merge
    them with

        python -m tfgradcomp.callbacks.timeline trace.worker-*.json -o trace.json

    Perfetto (ui.perfetto.dev) and chrome://tracing open the files. All workers must
    have the callback: when training begins, their clocks are compared by the times at
    which a collective ends on each of them. `clock_error_us` in the file bounds the
    remaining difference.

    The clock is read beside the step, whose bits stay the same. A collective's time
    includes waiting for the other workers. On a GPU, the clock is read when work is
    handed to the device. Inside XLA the clock cannot be read, and nothing is recorded.

    Args:
        path: The file, which is replaced.
        steps: The first step, and the step after the last, as the optimizer counts
            updates (`optimizer.iterations`).

    Raises:
        ValueError: If an argument is out of range; when `fit` begins, if the model is
            not trained by an optimizer of this package.

    Example:
        ```python
        timeline = tfgradcomp.callbacks.Timeline("trace.json", steps=(100, 110))
        model.fit(dataset, callbacks=[timeline])
        ```
    """

    _observer: _Recorder | None = None

    def __init__(self, path: str, steps: tuple[int, int] = (100, 110)):
        super().__init__()
        begin, end = steps
        if not 0 <= begin < end:
            raise ValueError(
                "steps must be the first step and the step after the last. "
                f"Received: steps={steps}"
            )
        self.path, self.steps = path, (begin, end)

    def on_train_begin(self, logs=None):
        """Compares the workers' clocks."""
        super().on_train_begin()
        self._clock = _compared_clocks(self._workers)
        self._is_written = False

    def on_train_batch_end(self, batch, logs=None):
        """Writes the file once all steps of the range have been taken."""
        recorder = self._observer
        if recorder and not self._is_written and recorder.is_complete:
            self._write(recorder)

    def on_train_end(self, logs=None):
        """Writes the recorded steps, if the end of the range was not reached."""
        if self._observer and not self._is_written:
            logger.warning(
                "Timeline has not seen all steps of its range. Expected: a training "
                "that takes them, without XLA and parameter servers. Received: "
                "steps=%s",
                self.steps,
            )
            self._write(self._observer)
        self._close()

    @override
    def _make_observer(self):
        names = [bucket.name for bucket in self._optimizer.stepper.buckets]
        return _Recorder(names, *self.steps)

    def _write(self, recorder):
        self._is_written = True
        rank, path = self._workers.rank, Path(self.path)
        if self._workers.num_workers > 1:
            path = path.with_name(f"{path.stem}.worker-{rank}{path.suffix}")
        events = []
        replicas = recorder.read()
        for index, steps in enumerate(replicas):
            events += _events(steps, rank * len(replicas) + index, self._clock)
        error = self._clock.error / 1e3
        metadata = {"steps": list(self.steps), "clock_error_us": error}
        timeline.write(path, events, metadata)


class _Recorder:
    """Keeps the timestamps of the steps of a range; an observer of a `Stepper`."""

    needs_all_buckets = True

    def __init__(self, bucket_names: list[str], begin: int, end: int):
        self._begin, self._end = begin, end
        self._timestamps = TimestampRows(bucket_names)
        shape = [end - begin, self._timestamps.width]
        self._rows = PerReplicaVariable(tf.zeros(shape, tf.float64), "timeline_rows")
        self._next = PerReplicaVariable(tf.zeros([], tf.int64), "timeline_next")

    def observe(self, step: ObservedStep) -> None:
        """Adds the recording of the timestamps to the graph of a step."""
        number = step.context.step

        def record(row, number):
            index = tf.reshape(number - self._begin, [1, 1])
            rows = tf.convert_to_tensor(self._rows)
            rows = tf.tensor_scatter_nd_update(rows, index, row[tf.newaxis])
            self._rows.assign(rows)
            self._next.assign(number + 1)

        conditional(
            (number >= self._begin) & (number < self._end),
            record,
            lambda row, number: None,
            args=(self._timestamps.row(step), number),
        )

    @property
    def is_complete(self) -> bool:
        """True if the last step of the range has been taken."""
        return int(self._next.local_values()[0]) == self._end

    def read(self) -> list[list[StepTimes]]:
        """Returns the steps of each local replica."""
        return [
            [times for row in rows if (times := self._timestamps.read(row))]
            for rows in self._rows.local_values()
        ]


class _Clock(NamedTuple):
    """A worker's clock against that of worker 0, in nanoseconds.

    Attributes:
        origin: Time of worker 0 that is 0 in the trace.
        ahead: This worker's clock minus worker 0's.
        error: Bound of the error of `ahead`.
    """

    origin: int
    ahead: int
    error: int


def _compared_clocks(workers: Workers) -> _Clock:
    """Compares the clocks of all workers when a collective ends.

    Workers that enter a collective together leave it within the duration of the
    collective, which bounds the error.
    """
    ahead, durations = [], []
    origin = 0
    for _ in range(_ROUNDS):
        workers.gather([0], _CALL_SITE)
        now = time.time_ns()
        times = workers.gather([now], _CALL_SITE)[:, 0]
        durations.append(time.time_ns() - now)
        origin = origin or int(times[0])
        ahead.append(int(times[workers.rank] - times[0]))
    if workers.num_workers == 1:
        return _Clock(origin, 0, 0)
    return _Clock(origin, int(np.median(ahead)), int(np.median(durations)))


def _events(steps: list[StepTimes], worker: int, clock: _Clock) -> list[timeline.Event]:
    """Returns the events of a worker."""

    def microseconds(seconds: float) -> float:
        return seconds * 1e6 - (clock.origin + clock.ahead) / 1e3

    events = []
    tracks = ["step"]
    for times in steps:
        tracks = ["step", *(bucket.name for bucket in times.buckets)]
        named = [
            (0, f"step {times.step}", times.begin, times.applied),
            (0, "forward and backward", times.begin, times.ready),
            (0, "apply", times.exchanged, times.applied),
        ]
        for track, bucket in enumerate(times.buckets, start=1):
            ends = bucket.phases[0].begin, bucket.phases[-1].end
            named.append((track, bucket.name, *ends))
            named += [(track, *phase) for phase in bucket.phases]
        for track, name, begin, end in named:
            ends = microseconds(begin), microseconds(end)
            events.append(timeline.event(name, *ends, worker, track, times.step))
    return timeline.names(worker, tracks) + events
