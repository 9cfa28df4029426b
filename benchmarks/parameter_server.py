"""Time steps with parameter servers between hosts with links of a given rate.

    sudo python benchmarks/parameter_server.py
    sudo python benchmarks/parameter_server.py --rate 1gbit --clusters 3x1

Chief, workers and servers are each in a network namespace of its own (`cluster.py`).
Methods by `tfgradcomp.ParameterServerTrainer` against TensorFlow's own
`ParameterServerStrategy` in float32, all in one run for each cluster; the workers'
interfaces count the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import cluster
from measuring import markdown
from processes import Processes, exit_on_signals
from report import head, publish
from virtual_cluster import PORT, rate_of

HERE = Path(__file__).resolve().parent
COLUMNS = (
    *("rate", "delay", "workers", "servers", "elements", "gradients", "mode"),
    *("steps", "seconds", "steps_per_second", "sent", "received"),
)


def measure(args: argparse.Namespace, num_workers: int, servers: int) -> list[dict]:
    """Returns a row for each way of training on a cluster."""
    count = 1 + num_workers + servers
    with cluster.virtual_cluster(count, args.rate, args.delay) as hosts:
        rows = measure_on(hosts, args, num_workers, servers)
    if not rows or rows[-1]["gradients"] != "float32":
        raise RuntimeError("the chief has failed; its output is above")
    for row in rows:
        row |= {"rate": args.rate, "delay": args.delay}
        row |= {"elements": elements(args), "workers": num_workers, "servers": servers}
    return rows


def measure_on(hosts, args, num_workers, servers):
    """As `measure`; bytes are a worker's, of one step."""
    counts = {"chief": 1, "worker": num_workers, "ps": servers}
    names = [(job, i) for job, count in counts.items() for i in range(count)]
    tasks = dict(zip(names, hosts, strict=True))
    described = {
        job: [f"{tasks[job, i].address}:{PORT}" for i in range(count)]
        for job, count in counts.items()
    }
    workers = [host for (job, _), host in tasks.items() if job == "worker"]
    script = [sys.executable, str(HERE / "parameter_server_task.py")]
    script += map(str, (args.units, num_workers, args.rounds))

    def environment(job, index):
        task = {"cluster": described, "task": {"type": job, "index": index}}
        return {
            **os.environ,
            "TF_CONFIG": json.dumps(task),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    rows, counted = [], []
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as others:
        for (job, index), host in tasks.items():
            if job != "chief":
                others.start(host.command(*script), environment(job, index))
        with subprocess.Popen(
            tasks["chief", 0].command(*script),
            env=environment("chief", 0),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as chief:
            try:
                for line in chief.stdout:
                    if line == "mark\n":
                        counted.append([host.counters() for host in workers])
                        chief.stdin.write("\n")
                        chief.stdin.flush()
                    elif line.startswith("{"):
                        rows.append(json.loads(line) | _bytes(*counted[-2:]))
            finally:
                chief.kill()
    for row in rows:
        row["sent"] /= row["steps"]
        row["received"] /= row["steps"]
        row["steps_per_second"] = row["steps"] / row["seconds"]
    return rows


def _bytes(before, after):
    pairs = list(zip(before, after, strict=True))
    return {
        "sent": sum(b.sent - a.sent for a, b in pairs),
        "received": sum(b.received - a.received for a, b in pairs),
    }


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table; each is compared to its cluster's float32."""
    titles = ["workers", "servers", "gradients travel by", "mode", "steps a second"]
    titles += ["times as many", "MB up a step", "MB down a step", "times fewer, up"]
    references = {
        (row["workers"], row["servers"]): row
        for row in rows
        if row["gradients"] == "float32"
    }

    def cells(row):
        reference = references[row["workers"], row["servers"]]
        rate = row["steps_per_second"]
        return [
            *(row[name] for name in ("workers", "servers", "gradients", "mode")),
            f"{rate:.2f}",
            f"{rate / reference['steps_per_second']:.1f}",
            *(f"{row[way] / 1e6:.2f}" for way in ("sent", "received")),
            *(f"{reference[way] / row[way]:.1f}" for way in ("sent", "received")),
        ]

    return markdown([*titles, "down"], [cells(row) for row in rows])


def elements(args: argparse.Namespace) -> int:
    """Returns how many the model has."""
    return args.units**2 + 2 * args.units + 1


def cluster_of(text: str) -> tuple[int, int]:
    """Parses `4x2`: workers and servers."""
    workers, _, servers = text.partition("x")
    return int(workers), int(servers)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--clusters",
        type=cluster_of,
        nargs="+",
        default=[(2, 1), (4, 2)],
        metavar="NxS",
        help="hosts that train, and hosts that serve",
    )
    add("--units", type=int, default=2240, help="the model has so many squared weights")
    add("--rounds", type=int, default=6, help="steps of each worker that are timed")
    add("--rate", type=rate_of, default="100mbit", help="of each link, each direction")
    add("--delay", default="0ms", help="of each packet on its way out of a host")
    add("--output", type=Path, help="folder for the files, instead of results/")
    args = parser.parse_args()
    exit_on_signals()
    try:
        rows = [row for pair in args.clusters for row in measure(args, *pair)]
    except RuntimeError as error:
        sys.exit(f"parameter_server.py: {error}")
    lines = [
        head(
            f"{elements(args)} elements; links of {args.rate}, delay {args.delay}; "
            f"{args.rounds} steps of each worker"
        ),
        "",
        *table(rows),
    ]
    publish(args.output, f"parameter server {args.rate}", COLUMNS, rows, lines)


if __name__ == "__main__":
    main()
