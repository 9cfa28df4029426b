"""Timelines in Chrome's trace format, and the command that merges those of workers.

    python -m tfgradcomp.callbacks.timeline trace.worker-*.json -o trace.json

Perfetto (https://ui.perfetto.dev) and chrome://tracing open the result. The format is
Chrome's "Trace Event Format": "X" is an event with a duration in microseconds. A
process (`pid`) stands for a worker, and a thread (`tid`) for one of its buckets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def event(
    name: str, begin: float, end: float, worker: int, track: int, step: int
) -> Event:
    """Returns an event with a duration.

    Args:
        name: Text that is shown.
        begin: Microseconds since the origin of the trace.
        end: Microseconds since the origin of the trace.
        worker: Rank of the worker.
        track: 0 for the step as a whole, else 1 + index of the bucket.
        step: Number of updates applied before.
    """
    # Rounded before the subtraction, so that nested events stay nested.
    begin, end = round(begin, 3), round(end, 3)
    return {
        "name": name,
        "ph": "X",
        "ts": begin,
        "dur": round(end - begin, 3),
        "pid": worker,
        "tid": track,
        "args": {"step": step},
    }


def names(worker: int, tracks: Sequence[str]) -> list[Event]:
    """Returns the events that name a worker and its tracks."""

    def metadata(kind: str, track: int, **arguments: Any) -> Event:
        event = {"name": kind, "ph": "M", "pid": worker, "tid": track}
        return {**event, "args": arguments}

    events = [
        metadata("process_name", 0, name=f"worker {worker}"),
        metadata("process_sort_index", 0, sort_index=worker),
    ]
    for track, name in enumerate(tracks):
        events.append(metadata("thread_name", track, name=name))
        events.append(metadata("thread_sort_index", track, sort_index=track))
    return events


def write(path: str | Path, events: list[Event], metadata: dict[str, Any]) -> None:
    """Writes a trace."""
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "metadata": metadata}
    Path(path).write_text(json.dumps(trace))


def merge(paths: Sequence[str | Path], out: str | Path) -> None:
    """Writes one trace with the events of the traces of several workers.

    Raises:
        ValueError: If a file is no trace, or if two are of the same worker.
    """
    events: list[Event] = []
    metadata: dict[str, Any] = {}
    path_of_worker: dict[int, str] = {}
    for path in map(str, paths):
        try:
            trace = json.loads(Path(path).read_text())
            new_events = trace["traceEvents"]
            workers = {event["pid"] for event in new_events}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                "Only traces that the callback Timeline has written can be merged. "
                f"Received: {path}, {type(error).__name__}: {error}"
            ) from error
        for worker in workers:
            if worker in path_of_worker:
                files = [path_of_worker[worker], path]
                raise ValueError(
                    "Two traces are of one worker. Give each file of one training "
                    f"once. Received: {worker=}, {files=}"
                )
            path_of_worker[worker] = path
        events += new_events
        metadata[Path(path).name] = trace.get("metadata", {})
    write(out, events, metadata)


def main(arguments: Sequence[str] | None = None) -> None:
    """Merges the files that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tfgradcomp.callbacks.timeline",
        description="Merge the timelines of several workers into one file.",
    )
    parser.add_argument("files", nargs="+", help="trace.worker-<rank>.json")
    parser.add_argument("-o", "--out", required=True, help="the file to write")
    given = parser.parse_args(arguments)
    try:
        merge(given.files, given.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
