"""Measure how much of the exchange hides behind the backward pass.

    sudo python benchmarks/overlap.py
    sudo python benchmarks/overlap.py --models ResNet-50 --rate 100mbit --output /tmp/o
    sudo python benchmarks/overlap.py --carriers grpc tcp

Workers in network namespaces (`cluster.py`), one for each core, take these steps in
turn: the forward pass alone; forward and backward pass with an update but no exchange
(`alone`); an update by the gradients of the first step, without exchange (`update`) and
with it (`exchange`); and the whole step, these two by each carrier. Medians over rounds
of the slowest worker's seconds; means of the cores' idle time, so that nothing else may
run on the machine.

- An exchange takes E = exchange - update. In W of it the cores are idle.
- Hidden is alone + E - step.
- W can be hidden, as far as the backward pass, alone - forward, is as long. What
  computes cannot be hidden where the backward pass has all cores. Below a twentieth of
  `alone` it is noise, and no share is given.
- The step is idle for longer than `alone` is; W less this time is hidden idle time.
  Hidden is shorter than that, because computing takes longer in the step than alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path

import cluster
import measuring
import virtual_cluster
from processes import exit_on_signals
from report import RUN, csv_of, head, kept_rows, publish, run

from tfgradcomp.collectives import CARRIERS

MODELS = ("ResNet-50", "BERT-base")
METHODS = ("float32", "TernGrad", "Signum", "DistEFBlockSGDM")
OF_TORCH = ("DDP", "DDP, float16")
# What tells rows apart.
KEY = ("model", "rate", "workers", "method", "carrier", "bucket_mib")
MEASURED = ("alone_ms", "exchange_ms", "wait_ms", "step_ms", "hidden_ms")
MEASURED += ("hidden_share", "still_waits_ms", "hidden_wait_share")
COLUMNS = (*KEY, *MEASURED, *RUN)


def row_of(answers: list[dict], carrier: str) -> dict:
    """Returns the measured columns of a row."""
    milliseconds, idle = {}, {}
    for name in answers[0]["seconds"]:
        rounds = zip(*(answer["seconds"][name] for answer in answers), strict=True)
        milliseconds[name] = 1e3 * statistics.median(map(max, rounds))
        # Hundredths of a second are too coarse for a median.
        means = [statistics.mean(answer["idle"][name]) for answer in answers]
        idle[name] = 1e3 * statistics.mean(means)
    exchanging, stepping = f"exchange, {carrier}", f"step, {carrier}"
    alone, step = milliseconds["alone"], milliseconds[stepping]
    exchange = milliseconds[exchanging] - milliseconds["update"]
    wait = idle[exchanging] - idle["update"]
    still_waits = idle[stepping] - idle["alone"]
    hidden = alone + exchange - step
    can_hide = min(wait, alone - milliseconds["forward"])

    def share(part):
        return part / can_hide if can_hide > alone / 20 else None

    return {
        "alone_ms": alone,
        "exchange_ms": exchange,
        "wait_ms": wait,
        "step_ms": step,
        "hidden_ms": hidden,
        "hidden_share": share(hidden),
        "still_waits_ms": still_waits,
        "hidden_wait_share": share(wait - still_waits),
    }


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["model", "links", "gradients travel by", "over", "buckets, MiB"]
    titles += ["alone, ms", "exchange, ms", "of it idle, ms", "step, ms"]
    titles += ["hidden, ms", "of what can be", "still idle, ms", "idle time hidden"]
    told = [name for name in KEY if name != "workers"]

    def cell(row, name):
        if row[name] is None:
            return None
        is_share = name.endswith("share")
        return f"{100 * row[name]:.0f} %" if is_share else f"{row[name]:.0f}"

    return measuring.markdown(
        titles,
        [
            [*(row[name] for name in told), *(cell(row, name) for name in MEASURED)]
            for row in rows
        ],
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--methods", nargs="+", default=METHODS)
    add("--carriers", nargs="+", choices=CARRIERS, default=["grpc"])
    add("--buckets", type=int, nargs="+", default=[4, 16, 64], help="MiB of float32")
    add("--workers", type=int, default=2, help="one for each core")
    add("--rate", type=virtual_cluster.rate_of, default="1gbit", help="of each link")
    add("--rounds", type=int, default=7, help="each step is timed so often")
    add(
        "--torch",
        action=argparse.BooleanOptionalAction,
        default=importlib.util.find_spec("torch") is not None,
        help="measure PyTorch, too",
    )
    add("--keep", action="store_true", help="keep rows that are not measured now")
    add("--timeout", type=float, default=1200, help="seconds that a run may take")
    add("--output", type=Path, help="folder; default: results and README.md here")
    args = parser.parse_args()
    exit_on_signals()
    threads = measuring.threads(None, args.workers)
    runs = []
    for method in args.methods:
        plain = method == "float32"
        carriers = ["grpc"] if plain else args.carriers
        for bucket in [None] if plain else args.buckets:
            runs.append(("overlap_worker.py", method, carriers, bucket))
    if args.torch:
        runs += [("overlap_torch_worker.py", m, ["gloo"], None) for m in OF_TORCH]
    rows = []
    with cluster.virtual_cluster(args.workers, args.rate) as hosts:
        commands = virtual_cluster.commands(hosts)
        for model in args.models:
            for script, method, carriers, bucket in runs:
                task = {"model": model, "method": method, "carriers": carriers}
                task |= {"bucket_mib": bucket, "rounds": args.rounds}
                answers = measuring.run(script, task, commands, threads, args.timeout)
                task |= {"rate": args.rate, "workers": args.workers} | run()
                for carrier in carriers:
                    found = task | {"carrier": carrier} | row_of(answers, carrier)
                    rows.append({name: found[name] for name in COLUMNS})
                    print(rows[-1], flush=True)
    name = f"overlap-{args.rate}"
    if args.keep:
        rows = kept_rows(csv_of(args.output, name), KEY, rows)
    facts = f"{args.workers} workers; {args.rounds} rounds"
    lines = [head(facts, rows), "", *table(rows)]
    publish(args.output, name, COLUMNS, rows, lines)


if __name__ == "__main__":
    main()
