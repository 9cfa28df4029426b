"""Compare what `tfgradcomp.planning` predicts with steps on a virtual cluster.

    sudo python benchmarks/plan_validation.py
    sudo python benchmarks/plan_validation.py --workers 2 --rates 1gbit \
        --output /tmp/plan

For each number of workers, all on this machine and at once, and each rate:

1. the collectives are measured by loopback, and the steps of the stock optimizer and of
   each method with collectives that cost nothing, on all N workers at once;
2. the steps on links of that rate are predicted, and written down;
3. the steps are measured (`virtual_cluster.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path

import cluster
import exchange
import measuring
import virtual_cluster
from processes import exit_on_signals
from report import commit, processor, publish
from workloads import WORKLOADS

from tfgradcomp import planning
from tfgradcomp.planning import output
from tfgradcomp.planning.forecasts import FLOAT32, no_arithmetic
from tfgradcomp.planning.network import bits_per_second
from tfgradcomp.transports import Costs, LinearCost

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "planning.md"
METHODS = ["TernGrad", "SignSGD", "DistEFBlockSGDM"]
TRANSPORT = "sharded"
PROBES = {
    "gather": [64, 1 << 19],
    "all_to_all": [64, 1 << 20],
    "sum": [64, 1 << 22],
}
COLUMNS = ("workers", "rate", "method", "transport", "predicted_ms", "measured_ms")
COLUMNS += ("error", "compute_ms", "arithmetic_ms", "software_ms", "link_ms")


def lines_of(answers: list[dict]) -> dict[str, LinearCost]:
    """Returns the duration of each kind of collective, the slowest worker's."""
    found = {}
    for kind in answers[0]["collectives"]:
        points = []
        for index in range(2):
            of_workers = [a["collectives"][kind][index] for a in answers]
            rounds = zip(*(times for _, times in of_workers), strict=True)
            points.append(
                (of_workers[0][0], statistics.median(max(times) for times in rounds))
            )
        (few, low), (many, high) = points
        found[kind] = LinearCost(low, max(high - low, 0.0) / (many - few))
    return found


def predict(args, count: int, rate: str, threads: int) -> list[dict]:
    """Returns a row for float32 and each method, `measured_ms` still missing."""
    task = {"workload": args.workload, "methods": METHODS, "probes": PROBES}
    task["rounds"] = 11
    commands = exchange.commands(count)
    answers = measuring.run("plan_worker.py", task, commands, threads, args.timeout)
    compute = measuring.slowest(answers, "compute")
    software = planning.software_of(Costs(**lines_of(answers)), count)
    made = planning.plan(
        WORKLOADS[args.workload](),
        compute,
        planning.Link(bits_per_second(rate)),
        [count],
        methods=METHODS,
        profile=planning.Profile(software, no_arithmetic),
    )
    rows = []
    for one in made.forecasts:
        if one.transport == TRANSPORT:
            of_workers = [answer["methods"] for answer in answers]
            seconds = measuring.slowest(of_workers, one.method) - compute
            one = replace(one, arithmetic_seconds=max(seconds, 0.0))
        elif one.method != FLOAT32:
            continue
        full = output.row(made, one)
        rows.append({name: full[name] for name in COLUMNS if name in full})
        rows[-1] |= {"rate": rate, "predicted_ms": full["step_ms"]}
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(args, rows: list[dict], threads: int) -> None:
    """Measures the steps of rows of one number of workers and one rate."""
    variants = [{"name": row["method"], "transport": row["transport"]} for row in rows]
    task = {"workload": args.workload, "rounds": args.rounds, "interface": None}
    task["variants"] = variants
    with cluster.virtual_cluster(rows[0]["workers"], rows[0]["rate"]) as hosts:
        commands = virtual_cluster.commands(hosts)
        answers = measuring.run("worker.py", task, commands, threads, args.timeout)
    for index, row in enumerate(rows):
        of_workers = [answer["variants"][index] for answer in answers]
        row["measured_ms"] = 1e3 * measuring.slowest(of_workers, "seconds")
        row["error"] = row["predicted_ms"] / row["measured_ms"] - 1
        print(json.dumps(row), flush=True)


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["workers", "link", "gradients travel by", "predicted step, ms"]
    titles += ["measured step, ms", "predicted / measured - 1"]
    names = ("workers", "rate", "method", "predicted_ms", "measured_ms")
    return measuring.markdown(
        titles,
        [[*(row[name] for name in names), f"{row['error']:+.0%}"] for row in rows],
    )


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = {"type": lambda text: text.split(",")}
    add("--workload", choices=WORKLOADS, default="resnet50")
    add("--workers", **names, default=["2", "4"], help="numbers of workers")
    add("--rates", **names, default=["1gbit", "300mbit", "100mbit"])
    add("--rounds", type=int, default=3, help="each step is timed so often")
    add("--timeout", type=float, default=900, help="seconds that a run may take")
    add("--output", type=Path, help="folder; default: results, the page included")
    args = parser.parse_args()
    exit_on_signals()
    rows = []
    for count in map(int, args.workers):
        threads = measuring.threads(None, count)
        for rate in args.rates:
            new = predict(args, count, rate, threads)
            measure(args, new, threads)
            rows += new
    good = sum(abs(row["error"]) <= 0.2 for row in rows)
    lines = [
        f"{processor()}; {args.workload}; {args.rounds} rounds; "
        f"load {os.getloadavg()[0]:.0f}; {datetime.date.today()}, commit {commit()}. "
        f"{good} of {len(rows)} points within 20 %.",
        "",
        *table(rows),
    ]
    publish(args.output, "plan validation", COLUMNS, rows, lines, PAGE)


if __name__ == "__main__":
    main()
