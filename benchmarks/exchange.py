"""Time the exchange of gradients between processes on this machine.

    python benchmarks/exchange.py
    python benchmarks/exchange.py --workload lenet --workers 2 --output /tmp/exchange
    python benchmarks/exchange.py --sweep-workers 1,2,3,4 --apart

N workers under MultiWorkerMirroredStrategy apply constant gradients, different on each
worker, by every optimizer in turn: a round is a step of each, after a barrier, and a
step takes as long as its slowest worker. An exchange is the median step over the rounds
less the median of the same update with nothing exchanged: packing and unpacking count.
PyTorch's gloo and DDP run in processes of their own, before and after. Next to each
step stands the least time that it could take here (`floor.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import measuring
import speed_page
from processes import exit_on_signals
from report import plot_bars, plot_lines, write_csv, write_table

HERE = Path(__file__).resolve().parent
# Whose table has no name of its own.
DEFAULT = "resnet50"


def commands(workers: int, servers: int = 0):
    """Returns the function that starts a script on so many workers and servers."""
    launch = [sys.executable, "-m", "tfgradcomp.launch", "--workers", str(workers)]
    if servers:
        launch += ["--ps", str(servers)]
    return lambda *script: [[*launch, *script]]


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table of one number of workers."""
    titles = ["framework", "gradients travel by", "transport", "step, ms"]
    titles += ["nothing exchanged, ms", "exchange, ms", "of TensorFlow's float32"]
    titles += ["of gloo's float32", "MB received", *measuring.FLOORS]

    def ratio(value):
        return None if value is None else f"{value:.2f}"

    def cells(row):
        declared = row["declared_bytes_received"]
        return [
            *(row[name] for name in ("framework", "variant", "transport")),
            *(row[name] for name in ("step_ms", "plain_ms", "exchange_ms")),
            *(ratio(row.get(name)) for name in ("of_float32", "of_gloo")),
            None if declared is None else declared / 1e6,
            *measuring.floors(row),
        ]

    return measuring.markdown(titles, [cells(row) for row in rows])


def sweep_table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table over the numbers of workers."""
    counts = list(dict.fromkeys(row["workers"] for row in rows))
    found = {(measuring.label(row), row["workers"]): row["exchange_ms"] for row in rows}
    names = list(dict.fromkeys(name for name, _ in found))
    return measuring.markdown(
        ["exchange, ms", *(f"N = {count}" for count in counts)],
        [[name, *(found.get((name, count)) for count in counts)] for name in names],
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measuring.add_arguments(parser, rounds=15)
    parser.add_argument(
        "--sweep-workers",
        type=lambda text: [int(number) for number in text.split(",")],
        metavar="N,N,...",
        help="measure on each of these numbers of workers, and plot over them",
    )
    args = parser.parse_args()
    exit_on_signals()
    rows, peaks = [], []
    for workers in args.sweep_workers or [args.workers]:
        try:
            new, peak = measuring.measure(args, workers, commands(workers))
        except RuntimeError as error:
            sys.exit(f"exchange.py: {error}")
        rows += new
        peaks.append(peak)
    folder = args.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    name = "exchange sweep" if args.sweep_workers else "exchange"
    if args.workload != DEFAULT:
        name += f" {args.workload}"
    file = name.replace(" ", "_")
    if args.keep:
        rows = measuring.keep(folder / f"{file}.csv", rows)
    line = measuring.head(rows, max(peaks))
    if args.sweep_workers:
        lines = [line, "", *sweep_table(rows)]
        plot_lines(folder / f"{file}.png", rows, measuring.label)
    else:
        lines = [line, "", *table(rows)]
        plot_bars(folder / f"{file}.png", rows, measuring.label)
    write_csv(folder / f"{file}.csv", measuring.COLUMNS, rows)
    print("\n".join(lines))
    if args.output is not None:
        (folder / f"{file}.md").write_text("\n".join([*lines, ""]))
        return
    write_table(HERE / "README.md", name, lines)
    if name == "exchange":
        write_table(speed_page.PAGE, name, speed_page.summary(rows))


if __name__ == "__main__":
    main()
