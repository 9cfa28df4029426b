"""Time `fit` from its call to the end of its first step, with and without a wrapper.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --models LeNet --workers 1 --rounds 1 --output /tmp/s
    python benchmarks/start_up.py --models BERT-base --workers 4 --keep
    python benchmarks/start_up.py --servers 1 --models LeNet --workers 1 2 4 8

Each measurement has processes of its own, whose imports are not counted; the time of
the slowest worker is. A first step traces, compares the workers, and with
`transport="auto"` measures the transports. The ways take turns; medians over rounds.

With parameter servers the chief's `fit` is timed, next to TensorFlow's own strategy, of
which one step of each worker counts as one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path

import measuring
from exchange import commands
from processes import exit_on_signals
from report import RUN, csv_of, head, kept_rows, publish, run

MODELS = ("LeNet", "ResNet-50", "BERT-base")
METHODS = ("TernGrad", "DistEFBlockSGDM")
STOCK = "stock"
WAYS = (
    STOCK,
    *(f"{name} {way}" for name in METHODS for way in ("sharded", "auto")),
)
WITH_SERVERS = (STOCK, *(f"{name} auto" for name in METHODS))
KEY = ("model", "workers", "way")
COLUMNS = (*KEY, "first_seconds", "step_seconds", "of_stock")
COLUMNS += ("rounds", *RUN)


def rows_of(model: str, workers: int, args: argparse.Namespace) -> list[dict]:
    """Returns a row for each way."""
    threads = measuring.threads(None, workers)
    taken: dict = {way: [] for way in (WITH_SERVERS if args.servers else WAYS)}
    for _, way in itertools.product(range(args.rounds), taken):
        task = {"model": model, "way": way, "servers": args.servers}
        answers = measuring.run(
            "start_up_worker.py",
            task,
            commands(workers, args.servers),
            threads,
            args.timeout,
        )
        taken[way].append(
            [max(one[name] for one in answers) for name in ("first", "step")]
        )
    medians = {
        way: [statistics.median(column) for column in zip(*times, strict=True)]
        for way, times in taken.items()
    }
    facts = {"rounds": args.rounds} | run()
    return [
        {
            **{"model": model, "workers": workers, "way": way},
            **{"first_seconds": first, "step_seconds": step},
            "of_stock": first / medians[STOCK][0],
            **facts,
        }
        for way, (first, step) in medians.items()
    ]


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["model", "workers", "optimizer, transport", "first step, s"]
    titles += ["of stock SGD's", "a step later, s", "rounds", "measured, at commit"]
    return measuring.markdown(
        titles,
        [
            [
                *(row["model"], row["workers"], row["way"].replace(" ", ", ")),
                f"{row['first_seconds']:.2f}",
                f"{row['of_stock']:.2f}",
                f"{row['step_seconds']:.2f}",
                row["rounds"],
                f"{row['date']}, {row['commit']}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--workers", type=int, nargs="+", default=[1, 4])
    add("--servers", type=int, default=0, help="parameter servers, besides workers")
    add("--rounds", type=int, default=3, help="each way is timed so often")
    add("--keep", action="store_true", help="keep rows that are not measured now")
    add("--timeout", type=float, default=600, help="seconds that a start may take")
    add("--output", type=Path, help="folder; default: results and README.md here")
    args = parser.parse_args()
    exit_on_signals()
    rows = [
        row
        for model, workers in itertools.product(args.models, args.workers)
        for row in rows_of(model, workers, args)
    ]
    name = "start-up with servers" if args.servers else "start-up"
    if args.keep:
        rows = kept_rows(csv_of(args.output, name), KEY, rows)
    lines = [head(rows=rows), "", *table(rows)]
    publish(args.output, name, COLUMNS, rows, lines)


if __name__ == "__main__":
    main()
