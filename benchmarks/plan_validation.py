"""Compare what `tfgradcomp.planning` predicts with steps on a virtual cluster.

    sudo python benchmarks/plan_validation.py
    sudo python benchmarks/plan_validation.py --workers 2 --rates 1gbit \
        --output /tmp/plan

For each number of workers, all on this machine, and each rate:

1. the collectives are measured by loopback, and the steps of the stock optimizers and
   of each method with collectives that cost nothing (`plan_worker.py`);
2. the steps on links of that rate are predicted, and written down;
3. the steps are measured on such links (`cluster.py`), in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path

import cluster
import exchange
import measuring
import virtual_cluster
from plan_worker import Case
from processes import exit_on_signals
from report import RUN, csv_of, head, kept_rows, publish, run
from workloads import WORKLOADS

from tfgradcomp import planning
from tfgradcomp.planning import output
from tfgradcomp.planning.forecasts import no_arithmetic
from tfgradcomp.planning.network import bits_per_second
from tfgradcomp.transports import Costs, LinearCost

NAME = "plan validation"
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "planning.md"
CASES = [
    Case("float32", None, "all_reduce"),
    Case("bfloat16", "HalfPrecision", "all_reduce"),
    Case("TernGrad", "TernGrad", "sharded"),
    Case("SignSGD", "SignSGD", "sharded"),
    Case("DistEFBlockSGDM", "DistEFBlockSGDM", "sharded"),
    Case("PowerSGD", "PowerSGD", "all_reduce"),
    Case("OneBitAdam", "OneBitAdam", "sharded", {"warmup_steps": 1}, "Adam"),
    Case("LocalSteps", "DistEFBlockSGDM", "sharded", {}, "SGD", 16),
]
# More workers than these get a small model: 16 with GoogLeNet's need more than 20 GB.
MANY = 4
# The steps without an exchange, by inner optimizers.
STOCK = {name: Case(name, None, "", inner=name) for name in ("SGD", "Adam")}
PROBES = {
    "gather": [64, 1 << 19],
    "all_to_all": [64, 1 << 20],
    "sum": [64, 1 << 22],
}
COLUMNS = ("workload", "workers", "rate", "method", "transport", "predicted_ms")
COLUMNS += ("measured_ms",)
COLUMNS += ("error", "compute_ms", "arithmetic_ms", "software_ms", "link_ms", *RUN)
KEY = COLUMNS[:4]


def lines_of(carrier: str, answers: list[dict]) -> dict[str, LinearCost]:
    """Returns the duration of each kind of collective, the slowest worker's."""
    found = {}
    for kind in answers[0][carrier]:
        points = []
        for index in range(2):
            of_workers = [answer[carrier][kind][index] for answer in answers]
            rounds = zip(*(times for _, times in of_workers), strict=True)
            points.append(
                (of_workers[0][0], statistics.median(max(times) for times in rounds))
            )
        (few, low), (many, high) = points
        found[kind] = LinearCost(low, max(high - low, 0.0) / (many - few))
    return found


def predict(args, workload: str, count: int, rate: str) -> list[dict]:
    """Returns a row for each case, `measured_ms` still missing."""
    profiled = [*STOCK.values(), *(case for case in CASES if case.wrapper)]
    task = {"workload": workload, "cases": profiled, "probes": PROBES, "rounds": 11}
    commands, threads = exchange.commands(count), measuring.threads(None, count)
    answers = measuring.run("plan_worker.py", task, commands, threads, args.timeout)
    seconds = {
        name: statistics.median(times) for name, times in answers[0]["seconds"].items()
    }
    software, stock = (
        planning.software_of(Costs(**lines_of(carrier, answers)), count)
        for carrier in ("tcp", "grpc")
    )
    print(f"TCP: {software}", f"gRPC: {stock}", sep="\n", flush=True)
    rows = []
    for case in CASES:
        compute = seconds[case.inner]
        made = planning.plan(
            WORKLOADS[workload](),
            compute,
            planning.Link(bits_per_second(rate)),
            [count],
            methods=[case.candidate] if case.wrapper else [],
            local_steps=case.local_steps,
            profile=planning.Profile(software, no_arithmetic, stock=stock),
        )
        # The first one is float32.
        one, *others = made.forecasts
        if case.wrapper:
            one = next(f for f in others if f.transport == case.transport)
            arithmetic = seconds[case.name] - case.local_steps * compute
            one = replace(one, arithmetic_seconds=arithmetic)
        full = output.row(made, one)
        rows.append({name: full[name] for name in COLUMNS if name in full})
        rows[-1] |= {"workload": workload, "rate": rate, "method": case.name}
        rows[-1]["predicted_ms"] = full["step_ms"]
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(args, rows: list[dict]) -> None:
    """Measures the steps of rows of one number of workers and one rate."""
    count = rows[0]["workers"]
    task = {"workload": rows[0]["workload"], "cases": CASES, "rounds": args.rounds}
    task["patience"] = args.patience
    with cluster.virtual_cluster(count, rows[0]["rate"]) as hosts:
        commands, threads = (
            virtual_cluster.commands(hosts),
            measuring.threads(None, count),
        )
        answers = measuring.run("plan_worker.py", task, commands, threads, args.timeout)
    for case, row in zip(CASES, rows, strict=True):
        seconds = statistics.median(answers[0]["seconds"][case.name])
        row["measured_ms"] = 1e3 * seconds / case.local_steps
        row["error"] = row["predicted_ms"] / row["measured_ms"] - 1
        row |= run()
        print(json.dumps(row), flush=True)


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["model", "workers", "link", "gradients travel by", "predicted step, ms"]
    titles += ["measured step, ms", "predicted / measured - 1"]
    names = ("workload", "workers", "rate", "method", "predicted_ms", "measured_ms")
    return measuring.markdown(
        titles,
        [[*(row[name] for name in names), f"{row['error']:+.0%}"] for row in rows],
    )


def write(args, rows: list[dict]) -> None:
    """Writes what has been measured so far, and with `--keep` earlier rows."""
    if args.keep:
        rows = kept_rows(csv_of(args.output, NAME), KEY, rows)
    good = sum(abs(row["error"]) <= 0.2 for row in rows)
    facts = f"{args.rounds} rounds; load {os.getloadavg()[0]:.0f}"
    first = f"{head(facts, rows)} {good} of {len(rows)} points within 20 %."
    publish(args.output, NAME, COLUMNS, rows, [first, "", *table(rows)], PAGE)


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = {"type": lambda text: text.split(",")}
    add("--workload", choices=WORKLOADS, help="default: by the number of workers")
    add("--workers", **names, default=["2", "4", "16"], help="numbers of workers")
    add("--rates", **names, default=["1gbit", "300mbit", "100mbit"])
    add("--rounds", type=int, default=3, help="each step is timed so often")
    add("--patience", type=float, default=5, help="seconds; longer steps only once")
    add("--timeout", type=float, default=900, help="seconds that a run may take")
    add("--keep", action="store_true", help="keep rows that are not measured now")
    add("--output", type=Path, help="folder; default: results, the page included")
    args = parser.parse_args()
    exit_on_signals()
    rows: list[dict] = []
    for count in map(int, args.workers):
        workload = args.workload or ("resnet50" if count <= MANY else "lenet")
        for rate in args.rates:
            new = predict(args, workload, count, rate)
            measure(args, new)
            rows += new
            write(args, rows)


if __name__ == "__main__":
    main()
