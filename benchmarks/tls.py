"""Time steps between two hosts with and without mutual TLS, on links of given rates.

    sudo python benchmarks/tls.py
    sudo python benchmarks/tls.py --rates 1gbit --workload lenet --output /tmp/tls

Each host is a network namespace (`cluster.py`) with a worker of each of two trainings:
one is connected by TCP, the other by `tfgradcomp-launch --tls`. They take turns, round
by round, while the other waits. A step takes as long as its slowest worker. The proxies
run on the cores of this machine, beside the workers: real hosts have their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import cluster
from measuring import markdown, slowest, threads
from processes import Processes, exit_on_signals
from report import head, publish
from virtual_cluster import PORT, rate_of
from workloads import WORKLOADS

from tfgradcomp.certificates import create_for_cluster
from tfgradcomp.planning.network import bits_per_second
from tfgradcomp.planning.shapes import sizes

HERE = Path(__file__).resolve().parent
COLUMNS = ("rate", "tcp_mbit", "workload", "elements", "rounds", "variant")
COLUMNS += ("plain_ms", "tls_ms", "of_plain")
VARIANTS = {
    "float32": None,
    "TernGrad": "all_gather",
    "DistEFSGD": "all_gather",
}
WORKERS = 2


def measure(args: argparse.Namespace, rate: str) -> list[dict]:
    """Returns a row for each variant on links of a rate."""
    with (
        cluster.virtual_cluster(WORKERS, rate) as hosts,
        tempfile.TemporaryDirectory() as name,
        Processes(Path(name)) as processes,
    ):
        got = cluster.tcp_rate(*hosts, round(bits_per_second(rate) / 8))
        folder = Path(name)
        variants = [{"name": v, "transport": by} for v, by in VARIANTS.items()]
        task = {"workload": args.workload, "rounds": args.rounds, "variants": variants}
        (folder / "task.json").write_text(json.dumps(task))
        create_for_cluster(folder / "tls")
        options = {"plain": [], "tls": ["--tls", str(folder / "tls")]}
        # Each training waits while the other takes its turn.
        env = {**os.environ, "TF_NUM_INTRAOP_THREADS": str(threads(None, WORKERS))}
        for number, (way, given) in enumerate(options.items()):
            addresses = ",".join(f"{host.address}:{PORT + number}" for host in hosts)
            launch = [sys.executable, "-m", "tfgradcomp.launch", *given]
            launch += ["--cluster", addresses]
            script = [str(HERE / "tls_worker.py"), name, way]
            for index, host in enumerate(hosts):
                command = [*launch, "--index", str(index), *script]
                processes.start(host.command(*command), env)
        processes.wait(args.timeout)
        answers = {
            way: [
                json.loads((folder / f"answer-{way}-{rank}.json").read_text())
                for rank in range(WORKERS)
            ]
            for way in options
        }
    rows = []
    for number, variant in enumerate(VARIANTS):
        plain, tls = (
            1e3 * slowest([worker[number] for worker in of_workers])
            for of_workers in answers.values()
        )
        row = {"rate": rate, "tcp_mbit": got / 1e6, "workload": args.workload}
        elements = sum(sizes(WORKLOADS[args.workload]()))
        row |= {"elements": elements, "rounds": args.rounds}
        row |= {"variant": variant, "plain_ms": plain, "tls_ms": tls}
        rows.append({**row, "of_plain": tls / plain})
    return rows


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["link", "TCP, Mbit/s", "gradients travel by", "step, ms"]
    titles += ["with TLS, ms", "times as long"]
    names = ("rate", "tcp_mbit", "variant", "plain_ms", "tls_ms")
    return markdown(
        titles,
        [[*(row[name] for name in names), f"{row['of_plain']:.2f}"] for row in rows],
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rates", type=lambda text: [rate_of(rate) for rate in text.split(",")])
    add("--workload", choices=WORKLOADS, default="resnet50")
    add("--rounds", type=int, default=15, help="each variant is timed so often")
    add("--timeout", type=float, default=1200, help="seconds that a rate may take")
    add("--output", type=Path, help="folder; default: results, README.md included")
    parser.set_defaults(rates=["1gbit", "10gbit"])
    args = parser.parse_args()
    exit_on_signals()
    try:
        rows = [row for rate in args.rates for row in measure(args, rate)]
    except RuntimeError as error:
        sys.exit(f"tls.py: {error}")
    line = head(
        f"{args.workload}, {rows[0]['elements']} elements; {WORKERS} "
        f"workers, threads each: {threads(None, WORKERS)}; {args.rounds} rounds"
    )
    publish(args.output, "tls", COLUMNS, rows, [line, "", *table(rows)])


if __name__ == "__main__":
    main()
