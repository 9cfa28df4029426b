"""Time steps with parameter servers between hosts with links of a given rate.

    sudo python benchmarks/parameter_server.py
    sudo python benchmarks/parameter_server.py --rate 1gbit --workers 4 --servers 2

Chief, workers and servers are each in a network namespace of its own (`cluster.py`).
TernGrad by `tfgradcomp.ParameterServerTrainer` against TensorFlow's own
`ParameterServerStrategy` in float32; the workers' interfaces count the bytes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import cluster
from measuring import markdown
from processes import Processes, exit_on_signals
from report import commit, processor, write_csv, write_table
from virtual_cluster import PORT, rate_of

HERE = Path(__file__).resolve().parent
COLUMNS = (
    *("rate", "delay", "workers", "servers", "elements", "gradients", "mode"),
    *("steps", "seconds", "steps_per_second", "sent", "received"),
)


def measure(hosts: list[cluster.Host], args: argparse.Namespace) -> list[dict]:
    """Returns a row for each way of training; bytes are a worker's, of one step."""
    counts = {"chief": 1, "worker": args.workers, "ps": args.servers}
    names = [(job, i) for job, count in counts.items() for i in range(count)]
    tasks = dict(zip(names, hosts, strict=True))
    described = {
        job: [f"{tasks[job, i].address}:{PORT}" for i in range(count)]
        for job, count in counts.items()
    }
    workers = [host for (job, _), host in tasks.items() if job == "worker"]
    script = [sys.executable, str(HERE / "parameter_server_task.py")]
    script += map(str, (args.units, args.workers, args.rounds))

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
    """Returns the lines of the table; the last row is what others are compared to."""
    titles = ["gradients travel by", "mode", "steps a second", "times as many"]
    titles += ["MB up a step", "MB down a step", "times fewer, up", "down"]
    reference = rows[-1]

    def cells(row):
        rate = row["steps_per_second"]
        return [
            *(row["gradients"], row["mode"], f"{rate:.2f}"),
            f"{rate / reference['steps_per_second']:.1f}",
            *(f"{row[way] / 1e6:.2f}" for way in ("sent", "received")),
            *(f"{reference[way] / row[way]:.1f}" for way in ("sent", "received")),
        ]

    return markdown(titles, [cells(row) for row in rows])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=2, help="hosts that train")
    add("--servers", type=int, default=1, help="hosts that serve")
    add("--units", type=int, default=2240, help="the model has so many squared weights")
    add("--rounds", type=int, default=6, help="steps of each worker that are timed")
    add("--rate", type=rate_of, default="100mbit", help="of each link, each direction")
    add("--delay", default="0ms", help="of each packet on its way out of a host")
    add("--output", type=Path, help="folder for the files, instead of results/")
    args = parser.parse_args()
    exit_on_signals()
    count = 1 + args.workers + args.servers
    try:
        with cluster.virtual_cluster(count, args.rate, args.delay) as hosts:
            rows = measure(hosts, args)
    except RuntimeError as error:
        sys.exit(f"parameter_server.py: {error}")
    elements = args.units**2 + 2 * args.units + 1
    if len(rows) < 3:
        sys.exit("parameter_server.py: the chief has failed; its output is above")
    for row in rows:
        row |= {"rate": args.rate, "delay": args.delay, "elements": elements}
        row |= {"workers": args.workers, "servers": args.servers}
    lines = [
        f"{processor()}; {elements} elements; {args.workers} workers, {args.servers} "
        f"servers; links of {args.rate}, delay {args.delay}; {args.rounds} steps of "
        f"each worker; {datetime.date.today()}, commit {commit()}.",
        "",
        *table(rows),
    ]
    folder = args.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / f"parameter_server_{args.rate}.csv", COLUMNS, rows)
    print("\n".join(lines))
    if args.output is None:
        write_table(HERE / "README.md", f"parameter server {args.rate}", lines)


if __name__ == "__main__":
    main()
