"""How many seconds training takes to an accuracy, on links of given rates.

    sudo python benchmarks/time_to_accuracy.py
    sudo python benchmarks/time_to_accuracy.py --seeds 0 --rates "" --keep
    sudo python benchmarks/time_to_accuracy.py --seeds "" --rates 1gbit --keep

Four workers train dense layers of 10 million parameters on Fashion-MNIST. The weights
do not depend on the network, so that two things are measured apart: the steps to the
accuracy, by workers of one machine that really train, once for each seed; and the
seconds of a step between hosts in network namespaces (`cluster.py`), the slowest
worker's, the mean over some steps of the same training. The result is their product;
looking at the accuracy takes no time. Each way has processes of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import cluster
import exchange
import measuring
import numpy as np
import virtual_cluster
from processes import exit_on_signals
from report import RUN, head, kept_rows, plot_accuracies, run, write_csv, write_table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
import data  # noqa: E402

WORKERS = 4
# What the table of the package's README has, and how it calls it.
SUMMARY = {
    "float32": "TensorFlow's float32",
    "float16": "float16, `HalfPrecision`",
    "DDP, float16": "PyTorch's DDP, float16",
    "DDP, PowerSGD rank 4": "PyTorch's DDP, PowerSGD",
    "TernGrad": "`TernGrad`",
    "Signum": "`Signum`",
    "DistEFBlockSGDM": "`DistEFBlockSGDM`",
    "PowerSGD": "`PowerSGD`",
}
KERAS = ("float32", "float16", "TernGrad", "Signum", "DistEFBlockSGDM", "ORQ")
KERAS += ("PowerSGD", "LocalSteps")
TORCH = ("DDP, float16", "DDP, PowerSGD rank 4")
# Steps that are not timed, and steps that are. Local steps come sixteen at a time.
TIMED, TIMED_LOCAL = (4, 6), (16, 32)
# Files, what tells their rows apart, and what is measured.
STEPS = "time_to_accuracy_steps", ("way", "seed", "step"), "accuracy"
LINKS = "time_to_accuracy_links", ("way", "rate"), "step_ms"


def train(args, way: str, folder: Path, commands, **task) -> list[dict]:
    """Returns the answers of one training."""
    script = "learning_torch_worker.py" if way in TORCH else "learning_worker.py"
    task = {
        "way": way,
        "data": str(folder / "data.npz"),
        "batch_size": args.batch_size,
        "every": 16,
        **task,
    }
    threads = measuring.threads(None, WORKERS)
    return measuring.run(script, task, commands, threads, args.timeout)


def learn(args, way: str, seed: int, folder: Path) -> list[dict]:
    """Returns a row for each look at the accuracy."""
    task = {"seed": seed, "steps": args.steps, "target": args.target}
    commands = exchange.commands(WORKERS)
    answers = train(args, way, folder, commands, on_links=False, **task)
    names, measured_by = (*STEPS[1], STEPS[2]), run()
    return [
        dict(zip(names, (way, seed, *look), strict=True)) | measured_by
        for look in answers[0]["accuracies"]
    ]


def clock(args, way: str, rate: str, folder: Path) -> dict:
    """Returns the row of a way's steps between hosts."""
    warm_up, timed = TIMED_LOCAL if way == "LocalSteps" else TIMED
    task = {"seed": 0, "steps": warm_up + timed, "target": None, "on_links": True}
    with cluster.virtual_cluster(WORKERS, rate) as hosts:
        commands = virtual_cluster.commands(hosts)
        answers = train(args, way, folder, commands, **task)
    steps = zip(*(answer["seconds"][warm_up:] for answer in answers), strict=True)
    milliseconds = 1e3 * statistics.mean(map(max, steps))
    return {"way": way, "rate": rate, "step_ms": milliseconds} | run()


def steps_to(rows: list[dict], target: float) -> dict[str, list[int | None]]:
    """Returns the steps to an accuracy by way, one number for each seed."""
    found = {}
    for row in rows:
        seeds = found.setdefault(row["way"], {})
        seeds.setdefault(row["seed"], None)
        if seeds[row["seed"]] is None and row["accuracy"] >= target:
            seeds[row["seed"]] = row["step"]
    return {way: list(seeds.values()) for way, seeds in found.items()}


def table(looks: list[dict], links: list[dict], target: float) -> list[str]:
    """Returns the lines of the table; seconds are for the median of the seeds."""
    rates = list(dict.fromkeys(row["rate"] for row in links))
    taken = {(row["way"], row["rate"]): row["step_ms"] for row in links}
    titles = ["gradients travel by", "steps, by seeds"]
    for rate in rates:
        titles += [f"a step at {rate}, ms", f"to the accuracy at {rate}, s"]
    rows = []
    for way, steps in steps_to(looks, target).items():
        row = [way, ", ".join("never" if s is None else str(s) for s in steps)]
        median = None if None in steps else statistics.median(steps)
        for rate in rates:
            each = taken.get((way, rate))
            row += [each, each and median and each * median / 1e3]
        rows.append(row)
    return measuring.markdown(titles, rows)


def summary(looks: list[dict], links: list[dict], target: float) -> list[str]:
    """Returns the lines of the table in the package's README: seconds, by ways."""
    rates = list(dict.fromkeys(row["rate"] for row in links))
    taken = {(row["way"], row["rate"]): row["step_ms"] for row in links}
    seconds = {
        way: [taken[way, rate] * statistics.median(steps) / 1e3 for rate in rates]
        for way, steps in steps_to(looks, target).items()
        if way in SUMMARY and None not in steps
    }
    titles = ["gradients travel by", *(f"seconds, links of {rate}" for rate in rates)]
    rows = [[SUMMARY[way], *seconds[way]] for way in SUMMARY if way in seconds]
    return measuring.markdown(titles, rows)


def main() -> None:
    """Trains, takes the time, and writes table, CSVs and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = {"type": lambda text: [name for name in text.split(";") if name]}
    add("--ways", **names, default=[*KERAS, *TORCH], help="with ; in between")
    add("--rates", **names, default=["1gbit", "100mbit"], help="with ; in between")
    add("--seeds", **names, default=["0", "1", "2"], help="with ; in between")
    add("--target", type=float, default=0.82, help="accuracy of 2000 test images")
    add("--batch-size", type=int, default=32, help="of each worker")
    add("--steps", type=int, default=480, help="the most steps of a training")
    add("--keep", action="store_true", help="keep rows that are not measured now")
    add("--timeout", type=float, default=1200, help="seconds that a training may take")
    add("--output", type=Path, help="folder; default: results, README.md included")
    args = parser.parse_args()
    exit_on_signals()
    looks, links = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_data(folder / "data.npz")
        for way in args.ways:
            for seed in map(int, args.seeds):
                looks += learn(args, way, seed, folder)
                print(looks[-1], flush=True)
            for rate in args.rates:
                links.append(clock(args, way, rate, folder))
                print(links[-1], flush=True)
    folder = args.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    for (file, key, measured), rows in ((STEPS, looks), (LINKS, links)):
        path = folder / f"{file}.csv"
        if args.keep:
            rows[:] = kept_rows(path, key, rows)
        write_csv(path, (*key, measured, *RUN), rows)
    facts = f"{WORKERS} workers, {args.batch_size} examples each; "
    facts += f"{args.target:.0%} of 2000 test images"
    lines = [
        head(facts, [*links, *looks]),
        "",
        *table(looks, links, args.target),
    ]
    print("\n".join(lines))
    plot_accuracies(folder / "time_to_accuracy.png", looks, links, args.target)
    if args.output is None:
        write_table(HERE / "README.md", "time to accuracy", lines)
        readme = summary(looks, links, args.target)
        write_table(HERE.parent / "README.md", "time to accuracy", readme)
    else:
        (folder / "time_to_accuracy.md").write_text("\n".join([*lines, ""]))


def save_data(path: Path) -> None:
    """Writes Fashion-MNIST as arrays, 2000 of its test images."""
    source = data.load()
    arrays = {}
    for prefix, dataset in (("", source.train), ("test_", source.test.take(2000))):
        x, y = data.arrays(dataset)
        arrays |= {f"{prefix}x": x, f"{prefix}y": y}
    np.savez(path, **arrays)


if __name__ == "__main__":
    main()
