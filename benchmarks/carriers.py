"""Time whole steps whose messages travel by gRPC and by TCP connections of our own.

    python benchmarks/carriers.py
    sudo python benchmarks/carriers.py --rates loopback,1gbit,10gbit

The workers of `worker.py` take steps by both carriers in turn, in one run, so that what
disturbs the machine disturbs both. A step takes as long as its slowest worker; times
are medians over the rounds, and the time of the processor is that of a whole worker.
With a rate, each worker is in a network namespace of its own (`cluster.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from pathlib import Path

import cluster
import exchange
import measuring
import report
import virtual_cluster
from processes import exit_on_signals
from workloads import WORKLOADS

CARRIERS = ("grpc", "tcp")
LOOPBACK = "loopback"
METHODS = "TernGrad,Signum,DistEFBlockSGDM,OneBitAdam"
# What tells rows apart.
KEY = ("rate", "workload", "workers", "method", "transport")
COLUMNS = (*KEY, "rounds", *report.RUN)
COLUMNS += ("grpc_ms", "grpc_processor_ms", "tcp_ms", "tcp_processor_ms", "ratio")


def measure(args, rate: str, workload: str, workers: int) -> list[dict]:
    """Returns a row for each method."""
    variants = [
        {"name": name, "transport": args.transport, "carrier": carrier}
        for name in args.methods
        for carrier in CARRIERS
    ]
    task = {"workload": workload, "variants": variants, "rounds": args.rounds}
    task |= {"interface": None}
    with contextlib.ExitStack() as stack:
        if rate == LOOPBACK:
            commands = exchange.commands(workers)
        else:
            hosts = stack.enter_context(cluster.virtual_cluster(workers, rate))
            commands = virtual_cluster.commands(hosts)
        number = measuring.threads(args.threads, workers)
        answers = measuring.run("worker.py", task, commands, number, args.timeout)
    for index, variant in enumerate(variants):
        updates = {str(answer["variants"][index]["update"]) for answer in answers}
        other = answers[0]["variants"][index ^ 1]["update"]
        if updates != {str(other)}:
            raise RuntimeError(f"the workers' weights differ. Received: {variant}")
    run = {"rounds": args.rounds} | report.run()
    rows = []
    for index in range(0, len(variants), 2):
        row = {"rate": rate, "workload": workload, "workers": workers}
        row |= {"method": variants[index]["name"], "transport": args.transport}
        row |= run
        for offset, carrier in enumerate(CARRIERS):
            of_workers = [a["variants"][index + offset] for a in answers]
            for name, key in (("ms", "seconds"), ("processor_ms", "processor")):
                seconds = measuring.slowest(of_workers, key)
                row[f"{carrier}_{name}"] = 1e3 * seconds
        row["ratio"] = row["grpc_ms"] / row["tcp_ms"]
        rows.append(row)
    return rows


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["link", "model", "workers", "method", "gRPC, ms", "processor, ms"]
    titles += ["TCP, ms", "processor, ms", "times", "rounds", "machine", "date, commit"]
    names = KEY[:4] + COLUMNS[-5:-1]
    cells = [
        [
            *(row[name] for name in names),
            f"{row['ratio']:.2f}",
            row["rounds"],
            row["machine"],
            f"{row['date']}, {row['commit']}",
        ]
        for row in rows
    ]
    return measuring.markdown(titles, cells)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument

    def words(text):
        return text.split(",")

    add("--rates", type=words, default=[LOOPBACK], help="as `tc` takes them")
    add("--workloads", type=words, default=["resnet50", "lenet"])
    add("--workers", type=words, default=["2", "4"])
    add("--methods", type=words, default=METHODS.split(","))
    add("--transport", default="auto")
    add("--rounds", type=int, default=21)
    add("--threads", type=int, help="intra-op threads a worker; default: its share")
    add("--timeout", type=float, default=1200, help="seconds that a run may take")
    add("--keep", action="store_true", help="keep the other rows of the table")
    add("--output", type=Path, help="folder; default: results, README.md included")
    args = parser.parse_args()
    if unknown := {*args.workloads} - {*WORKLOADS}:
        parser.error(f"--workloads is one of {[*WORKLOADS]}, not {sorted(unknown)}")
    exit_on_signals()
    rows, failure = [], None
    for case in itertools.product(args.rates, args.workloads, map(int, args.workers)):
        try:
            rows += measure(args, *case)
        except RuntimeError as error:
            failure = f"carriers.py: {error}"
            break
        print(*table(rows[-len(args.methods) :])[2:], sep="\n", flush=True)
    if args.keep or failure:
        path = report.csv_of(args.output, "carriers")
        rows = report.kept_rows(path, KEY, rows)
    report.publish(args.output, "carriers", COLUMNS, rows, table(rows))
    sys.exit(failure)


if __name__ == "__main__":
    main()
