"""Compare the choices of `tfgradcomp.planning` with the best methods, measured.

    sudo python benchmarks/choices.py
    sudo python benchmarks/choices.py --models resnet50 --workers 4 --keep
    sudo python benchmarks/choices.py --quick --output /tmp/choices

Workers in network namespaces (`cluster.py`) exchange gradients of a model's shapes. On
links of each rate, a method is chosen for each class of risk, from what was measured on
that cluster right before. Then the updates with all methods are timed, in turn; medians
of the slowest worker's seconds. Errors of layers rule nothing out.

Nothing is computed before an update. `--compute-ms` adds a constant to all times, as an
accelerator would that neither uses the processor nor overlaps the exchange.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import cluster
import measuring
import virtual_cluster
from choices_worker import STOCK
from processes import exit_on_signals
from report import RUN, csv_of, head, kept_rows, publish, run, write_csv
from workloads import SMALL, WORKLOADS

from tfgradcomp.planning.risks import RISKS

# A choice is good within this factor of the best method.
NEAR = 1.1
POINT = ("model", "rate", "workers")
COLUMNS = (*POINT, "risk", "choice", "predicted_ms", "choice_ms", "best", "best_ms")
COLUMNS += ("of_best", "float32_ms", "of_float32", *RUN)
STEPS = (*POINT, "method", "risk", "transports", "rounds", "measured_ms")
STEPS += ("predicted_ms", "compute_ms", *RUN)


def steps_of(point: dict, answer: dict, compute_ms: float) -> list[dict]:
    """Returns a row for each method at a point.

    Args:
        point: The values of `POINT`.
        answer: Worker 0's, of one rate.
        compute_ms: What is added to the measured times.
    """
    rows, measured_by = [], run()
    for name, one in answer["methods"].items():
        predicted = answer["predicted"].get(name)
        measured = compute_ms + 1e3 * statistics.median(one["seconds"])
        rows.append(
            {
                **point,
                "method": name,
                "risk": one["risk"],
                "transports": " ".join(sorted({*one["transports"]})),
                "rounds": len(one["seconds"]),
                "measured_ms": measured,
                "predicted_ms": None if predicted is None else 1e3 * predicted,
                "compute_ms": 1e3 * answer["compute"],
                **measured_by,
            }
        )
    return rows


def choices_of(steps: list[dict], choices: dict[str, str]) -> list[dict]:
    """Returns a row for each class of risk at a point.

    Args:
        steps: The rows of the point's methods.
        choices: The chosen method of each risk.
    """
    by_name = {row["method"]: row for row in steps}
    stock, rows = by_name.pop(STOCK), []
    for risk, name in choices.items():
        allowed = RISKS[: RISKS.index(risk) + 1]
        best = min(
            (row for row in by_name.values() if row["risk"] in allowed),
            key=lambda row: row["measured_ms"],
        )
        chosen = by_name[name]
        rows.append(
            {
                **{name: stock[name] for name in (*POINT, *RUN)},
                "risk": risk,
                "choice": name,
                "predicted_ms": chosen["predicted_ms"],
                "choice_ms": chosen["measured_ms"],
                "best": best["method"],
                "best_ms": best["measured_ms"],
                "of_best": chosen["measured_ms"] / best["measured_ms"],
                "float32_ms": stock["measured_ms"],
                "of_float32": chosen["measured_ms"] / stock["measured_ms"],
            }
        )
    return rows


def counts(rows: list[dict]) -> str:
    """Returns the sentence with the two counts."""
    near = sum(row["of_best"] <= NEAR for row in rows)
    behind = sum(row["of_float32"] > NEAR for row in rows)
    return (
        f"{near} of {len(rows)} choices are within 10 % of the best method of their "
        f"class; {behind} are more than 10 % behind the stock optimizer's float32."
    )


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table; risks with the same choice share a line."""
    lines: dict[tuple, list] = {}
    for row in rows:
        key = tuple(row[name] for name in (*POINT, "choice", "best"))
        lines.setdefault(key, []).append(row)
    titles = ["model", "link", "workers", "risk", "choice", "ms", "best method", "ms"]
    titles += ["choice / best", "float32, ms"]
    return measuring.markdown(
        titles,
        [
            [
                *(same[0][name] for name in POINT),
                ", ".join(row["risk"] for row in same),
                *(same[0][name] for name in ("choice", "choice_ms", "best", "best_ms")),
                f"{same[0]['of_best']:.2f}",
                same[0]["float32_ms"],
            ]
            for same in lines.values()
        ],
    )


def measure(args: argparse.Namespace, model: str, count: int) -> dict:
    """Returns worker 0's answers, by rates."""
    task = {"workload": model, "rates": args.rates, "rounds": args.rounds}
    task |= {"patience": args.patience, "compute_ms": args.compute_ms}
    with cluster.virtual_cluster(count, args.rates[0]) as hosts:
        commands = virtual_cluster.commands(hosts)
        number = measuring.threads(None, count)
        task["hosts"] = hosts
        script = "choices_worker.py"
        return measuring.run(script, task, commands, number, args.timeout)[0]


def write(args, steps: list[dict], rows: list[dict]) -> None:
    """Writes what has been measured so far, and with `--keep` earlier rows."""
    path_of_steps = csv_of(args.output, "choices steps")
    if args.keep:
        rows = kept_rows(csv_of(args.output, "choices"), (*POINT, "risk"), rows)
        steps = kept_rows(path_of_steps, (*POINT, "method"), steps)
    facts = f"{args.rounds} rounds"
    lines = [f"{head(facts, rows)} {counts(rows)}", "", *table(rows)]
    publish(args.output, "choices", COLUMNS, rows, lines)
    write_csv(path_of_steps, STEPS, steps)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = {"type": lambda text: text.split(",")}
    add("--models", **names, default=SMALL, help=", ".join(WORKLOADS))
    # The first step of a method is not timed, and shortest on the quickest links.
    add("--rates", **names, default=["10gbit", "1gbit", "100mbit"])
    add("--workers", **names, default=["2", "4"])
    add("--rounds", type=int, default=5, help="each method is timed so often")
    add("--patience", type=float, default=1, help="seconds; longer steps only once")
    add("--compute-ms", type=float, default=0, help="added to each step")
    add("--timeout", type=float, default=900, help="seconds that a cluster may take")
    add("--keep", action="store_true", help="keep rows that are not measured now")
    add("--quick", action="store_true", help="one point with few rounds")
    add("--output", type=Path, help="folder; default: results, README.md included")
    args = parser.parse_args()
    if args.quick:
        args.models, args.rates, args.workers = ["lenet"], ["100mbit"], ["2"]
        args.rounds = 2
    exit_on_signals()
    steps, rows = [], []
    for model in args.models:
        for count in map(int, args.workers):
            for rate, answer in measure(args, model, count).items():
                point = {"model": model, "rate": rate, "workers": count}
                new = steps_of(point, answer, args.compute_ms)
                steps += new
                rows += choices_of(new, answer["choices"])
                for row in rows[-len(RISKS) :]:
                    print(json.dumps(row), flush=True)
            write(args, steps, rows)


if __name__ == "__main__":
    main()
