"""What the drivers of `worker.py` share: the variants, a run, and its rows.

A task, as a worker reads it from task.json, has

    workload: name of a list of shapes
    variants: list of {"name", "transport"}
    loops: what floors are made of (`floor.py`), or missing
    rounds: how often each variant is timed
    interface: whose bytes are counted, or null

and its answer the highest memory in bytes ("peak") and, for each variant, the seconds
and the bytes of every round, some weights after its first step from zero, the bytes
that it declares to receive, or the error for which it was left out; and for each loop
the seconds that an element took in every round ("loops").
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import report
from floor import floor, loops
from processes import Processes
from workloads import WORKLOADS, sizes

HERE = Path(__file__).resolve().parent
FLOAT32, GLOO = "float32", "gloo all-reduce, one vector"
OF_TENSORFLOW = (FLOAT32, "float16", "bfloat16")
OF_TORCH = (GLOO, "DDP", "DDP, float16", "DDP, PowerSGD rank 1")
METHODS = "TernGrad,SignSGD,Signum,DistEFBlockSGDM,PowerSGD"
TRANSPORTS = "all_gather,sharded,auto"
# The step that a variant is compared with; plain SGD for all others.
PLAIN = {"Signum": "SGD, momentum", "DistEFBlockSGDM": "SGD, Nesterov"}
COLUMNS = ("framework", "variant", "transport", "workload", "elements", "workers")
# What tells rows apart.
KEY = COLUMNS
COLUMNS += ("threads", "rounds", "step_ms", "plain_ms", "exchange_ms")
COLUMNS += ("of_float32", "of_gloo", "declared_bytes_received")
COLUMNS += ("memory_ms", "arithmetic_ms", "wire_ms", "floor_ms", "x_floor")
COLUMNS += report.RUN

# What a table says of a row's floor, and of the parts of it that every machine has.
FLOORS = ("memory, ms", "arithmetic, ms", "× floor")


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Adds the options that the drivers share."""
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="resnet50")
    add("--workers", type=int, default=4)
    add("--methods", type=_names, default=METHODS, help="classes of tfgradcomp")
    add("--transports", type=_names, default=TRANSPORTS, help="for each method")
    add(
        "--baselines",
        type=_names,
        default=OF_TENSORFLOW[1:],
        help="of TensorFlow's, beside float32",
    )
    add("--rounds", type=int, default=rounds, help="each variant is timed so often")
    add("--threads", type=int, help="intra-op threads a worker; default: its share")
    add(
        "--torch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure PyTorch, too",
    )
    add(
        "--apart",
        action="store_true",
        help="new processes for each method, with float32 beside it, where the "
        "states of all methods do not fit into memory at once",
    )
    add(
        "--keep",
        action="store_true",
        help="keep the rows of the table that this run does not measure",
    )
    add("--timeout", type=float, default=1200, help="seconds that a run may take")
    add("--output", type=Path, help="folder; default: results, README.md included")


def tasks(args: argparse.Namespace, interface: str | None) -> list[dict]:
    """Returns the tasks of TensorFlow's workers; more than one with `--apart`."""
    names = (FLOAT32, *args.baselines)
    variants = [{"name": name, "transport": None} for name in names]
    variants += [
        {"name": name, "transport": transport}
        for name in args.methods
        for transport in args.transports
    ]
    first, *rest = variants
    together = [[first, v] for v in rest] if args.apart else [variants]
    return [
        {
            "workload": args.workload,
            "rounds": args.rounds,
            "interface": interface,
            "loops": loops([variant["name"] for variant in group]),
            "variants": [
                *(
                    {"name": name, "transport": None}
                    for name in sorted({_plain(v) for v in group})
                ),
                *group,
            ],
        }
        for group in together
    ]


def threads(given: int | None, workers: int) -> int:
    """Returns the threads of a worker: those that are given, or its share of cores."""
    return given or max(1, len(os.sched_getaffinity(0)) // workers)


def run(
    script: str, task: dict, commands: Callable, number: int, timeout: float
) -> list[dict]:
    """Returns the answers of all workers to a task, in the order of ranks.

    Args:
        script: File in this folder.
        task: What the workers read.
        commands: Function of a script and its argument; returns the commands that
            start all workers.
        number: Threads of a worker.
        timeout: Seconds.

    Raises:
        RuntimeError: If a worker fails or is not ready in time.
    """
    described = ("TF_CONFIG", "SLURM_PROCID")
    env = {name: text for name, text in os.environ.items() if name not in described}
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        env[name] = str(number)
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task))
        for command in commands(str(HERE / script), name):
            processes.start(command, env)
        processes.wait(timeout)
        count = len(list(folder.glob("answer-*.json")))
        files = [folder / f"answer-{rank}.json" for rank in range(count)]
        return [json.loads(file.read_text()) for file in files]


def measure(
    args: argparse.Namespace,
    workers: int,
    commands: Callable,
    interface: str | None = None,
    rate: float | None = None,
) -> tuple[list[dict], int]:
    """Measures all variants on a number of workers.

    PyTorch has half of its rounds before TensorFlow's and half after.

    Args:
        args: The options.
        workers: N.
        commands: As for `run`.
        interface: Whose bytes are counted, or None.
        rate: Bits a second of its link, or None.

    Returns:
        The rows, and the highest memory of a worker in bytes.
    """
    number = threads(args.threads, workers)
    common = {
        "workload": args.workload,
        "elements": sum(sizes(WORKLOADS[args.workload]())),
        "workers": workers,
        "threads": number,
        "rounds": args.rounds,
        **report.run(),
    }
    with_torch = args.torch and importlib.util.find_spec("torch") is not None
    if args.torch and not with_torch:
        _say("no PyTorch here, going on without: pip install torch")

    def of_torch(rounds):
        if not with_torch or not rounds:
            return []
        variants = [{"name": name} for name in OF_TORCH]
        task = {"workload": args.workload, "rounds": rounds, "interface": interface}
        _say(f"{workers} workers of PyTorch, {rounds} rounds")
        task["variants"] = variants
        return run("torch_worker.py", task, commands, number, args.timeout)

    before = of_torch((args.rounds + 1) // 2)
    rows, peak = [], 0
    for task in tasks(args, interface):
        names = [_label(variant) for variant in task["variants"]]
        _say(f"{workers} workers: {'; '.join(names)}")
        answers = run("worker.py", task, commands, number, args.timeout)
        peak = max(peak, *(answer["peak"] for answer in answers))
        # The best round: what disturbs a loop has no part in a floor.
        loops_of_all = [answer["loops"] for answer in answers]
        seconds = {
            name: slowest(loops_of_all, name, middle=min) for name in task["loops"]
        }
        new = _rows_of_tensorflow(task, answers, common)
        for row in new:
            _add_floor(row, rate, seconds)
        rows += [row for row in new if not (rows and row["variant"] == FLOAT32)]
    after = of_torch(args.rounds // 2)
    if with_torch:
        of_torch = _rows_of_torch(before, after, common)
        for row in of_torch:
            _add_floor(row, rate, seconds)
        rows += of_torch
    return _with_ratios_to_gloo(rows), peak


def keep(path: Path, rows: list[dict]) -> list[dict]:
    """Returns rows, and those of an earlier run's CSV that they do not replace."""
    frameworks = ("TensorFlow", "tfgradcomp", "PyTorch")
    found = report.kept_rows(path, KEY, rows)
    found.sort(key=lambda row: frameworks.index(row["framework"]))
    return _with_ratios_to_gloo(found)


def _with_ratios_to_gloo(rows):
    gloo = [row["exchange_ms"] for row in rows if row["variant"] == GLOO]
    for row in rows:
        row["of_gloo"] = _ratio(row, gloo[0] if gloo else 0.0)
    return rows


def _rows_of_tensorflow(task, answers, common):
    found = {}
    for index, variant in enumerate(task["variants"]):
        of_workers = [answer["variants"][index] for answer in answers]
        if "error" in of_workers[0]:
            _say(f"{_label(variant)} is left out: {of_workers[0]['error']}")
            continue
        moves = variant["name"] not in {_plain(v) for v in task["variants"]}
        _check(_label(variant), of_workers, moves)
        found[_label(variant)] = (variant, of_workers)
    float32 = _ring(common, 4)
    rows = []
    for variant, of_workers in found.values():
        name = variant["name"]
        if (plain := _plain(variant)) == name:
            continue
        row = _row(of_workers, common, slowest(found[plain][1]))
        declared = of_workers[0]["declared"]
        of_library = name not in OF_TENSORFLOW
        rows.append(
            {
                "framework": "tfgradcomp" if of_library else "TensorFlow",
                "variant": name,
                "transport": variant["transport"] or "all_reduce",
                **row,
                "declared_bytes_received": float32 if declared is None else declared,
            }
        )
        if "sent" in row:
            for way in ("sent", "received"):
                # The barriers around a step are all that a plain one moves.
                rows[-1][way] -= _counted(found[plain][1], way)
    reference = next(row["exchange_ms"] for row in rows if row["variant"] == FLOAT32)
    for row in rows:
        row["of_float32"] = _ratio(row, reference)
    return rows


def _rows_of_torch(before, after, common):
    rows = []
    for index, name in enumerate(OF_TORCH):
        parts = [
            [answer["variants"][index] for answer in answers]
            for answers in (before, after)
            if answers
        ]
        for part in parts:
            _check(name, part, moves=True)
        of_workers = [
            {
                key: [value for part in parts for value in part[worker][key]]
                for key in ("seconds", "plain", "sent", "received")
            }
            for worker in range(common["workers"])
        ]
        plain = slowest(of_workers, "plain") if of_workers[0]["plain"] else 0.0
        width = {GLOO: 4, "DDP": 4, "DDP, float16": 2}.get(name)
        rows.append(
            {
                "framework": "PyTorch",
                "variant": name,
                "transport": "gloo",
                **_row(of_workers, common, plain),
                "declared_bytes_received": width and _ring(common, width),
            }
        )
    return rows


def _add_floor(row, rate, seconds):
    received = row["declared_bytes_received"]
    size = row["elements"], row["workers"]
    row |= floor(row["variant"], *size, received, rate, seconds)
    if "floor_ms" in row:
        row["x_floor"] = row["step_ms"] / row["floor_ms"]


def _row(of_workers, common, plain):
    step = slowest(of_workers)
    row = {**common, "step_ms": 1e3 * step, "plain_ms": 1e3 * plain}
    row["exchange_ms"] = 1e3 * (step - plain)
    if of_workers[0]["sent"]:
        row |= {way: _counted(of_workers, way) for way in ("sent", "received")}
    return row


def _ratio(row, reference):
    # One worker exchanges nothing: what is left is noise.
    return row["exchange_ms"] / reference if reference > 0 else None


def slowest(
    of_workers: list[dict],
    key: str = "seconds",
    middle: Callable = statistics.median,
) -> float:
    """Returns the middle, over the rounds, of the slowest worker's seconds."""
    rounds = zip(*(worker[key] for worker in of_workers), strict=True)
    return middle(max(times) for times in rounds)


def _counted(of_workers, way):
    return statistics.mean(statistics.median(worker[way]) for worker in of_workers)


def _check(name, of_workers, moves):
    updates = [worker["update"] for worker in of_workers]
    alike = all(update == updates[0] for update in updates)
    if len(updates) > 1 and alike != moves:
        raise RuntimeError(
            f"{name}: the workers' weights are {'equal' if alike else 'different'} "
            "after a step; its times would say nothing about an exchange. "
            f"Received: {updates}"
        )


def _ring(common, width):
    workers = common["workers"]
    return 2 * (workers - 1) / workers * width * common["elements"]


def _names(text):
    return [name for name in text.split(",") if name]


def _plain(variant):
    name = variant["name"]
    return name if name.startswith("SGD") else PLAIN.get(name, "SGD")


def _label(variant):
    return ", ".join(filter(None, (variant["name"], variant["transport"])))


def head(rows: list[dict], peak: int) -> str:
    """Returns the line above a table: where, what, when."""
    row = rows[0]

    def each(name):
        of_workers = {row["workers"]: row[name] for row in rows}
        return ", ".join(map(str, of_workers.values()))

    facts = (
        f"{row['workload']}, {row['elements']} elements; {each('workers')} workers, "
        f"threads each: {each('threads')}; {row['rounds']} rounds; "
        f"up to {peak / 1e9:.1f} GB a worker"
    )
    return report.head(facts, rows)


def markdown(titles: list[str], rows: list[list]) -> list[str]:
    """Returns the lines of a table; numbers get one digit below 100, None nothing."""

    def cell(value):
        if value is None:
            return ""
        if isinstance(value, float):
            return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
        return str(value)

    return [
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(map(cell, row))} |" for row in rows),
    ]


def floors(row: dict) -> list:
    """Returns a row's cells under `FLOORS`."""
    ratio = row.get("x_floor")
    parts = row.get("memory_ms"), row.get("arithmetic_ms")
    return [*parts, None if ratio is None else f"{ratio:.2f}"]


def label(row: dict) -> str:
    """Returns what a row is called in a plot."""
    if row["framework"] == "tfgradcomp":
        return f"{row['variant']}, {row['transport']}"
    return f"{row['framework']}: {row['variant']}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
