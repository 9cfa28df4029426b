"""Sample where the processor time of an optimizer's step goes.

    sudo python benchmarks/processor_time.py
    sudo python benchmarks/processor_time.py --methods SignSGD --output /tmp/time

Workers on one machine take the steps of `exchange.py` over and over, while Linux' perf
looks at each of them several hundred times a second. What a sample was in tells whose
time it is: the library of the package's own operations, TensorFlow's (gRPC is in it),
the C library, the kernel, or Python.
"""

from __future__ import annotations

import argparse
import collections
import shutil
import statistics
from pathlib import Path

import exchange
import measuring
from processes import exit_on_signals
from report import head, publish
from workloads import WORKLOADS

PARTS = ("own operations", "TensorFlow", "C library", "kernel", "Python and others")
# Of the file that a sample was in; the first that fits.
FILES = {
    "libtfgradcomp": "own operations",
    "libtensorflow": "TensorFlow",
    "_pywrap": "TensorFlow",
    "libc.so": "C library",
    "libc-": "C library",
    "libm.so": "C library",
    "libstdc++": "C library",
    "[kernel": "kernel",
    "[vdso": "kernel",
}
COLUMNS = ("method", "workers", "step_ms", "busy_ms", *PARTS)


def part_of(file: str) -> str:
    """Returns the part that a sample belongs to, by the file it was in."""
    found = (part for name, part in FILES.items() if file.startswith(name))
    return next(found, PARTS[-1])


def row_of(method: str, answers: list[dict]) -> dict:
    """Returns a method's row; milliseconds are those of a worker's step.

    Args:
        method: The method.
        answers: Of all workers: seconds and seconds of processor time of each step,
            and samples by file.
    """
    samples = collections.Counter()
    for answer in answers:
        for file, number in answer["samples"].items():
            samples[part_of(file)] += number
    busy = statistics.mean(statistics.mean(answer["busy"]) for answer in answers)
    whole = sum(samples.values())
    return {
        "method": method,
        "workers": len(answers),
        "step_ms": 1e3 * measuring.slowest(answers),
        "busy_ms": 1e3 * busy,
        **{part: 1e3 * busy * samples[part] / whole for part in PARTS},
    }


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["gradients travel by", "step, ms", "processor time, ms"]
    titles += [f"{part}, ms" for part in PARTS]
    names = ("method", "step_ms", "busy_ms", *PARTS)
    return measuring.markdown(titles, [[row[name] for name in names] for row in rows])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="resnet50")
    add("--methods", nargs="+", default=["float32", *measuring.METHODS.split(",")])
    add("--workers", type=int, default=4)
    add("--rounds", type=int, default=60, help="steps of each method")
    add("--timeout", type=float, default=300, help="seconds that a method may take")
    add("--output", type=Path, help="folder; default: results and README.md here")
    args = parser.parse_args()
    if shutil.which("perf") is None:
        parser.error("no perf here; on Debian: apt-get install linux-perf")
    exit_on_signals()
    threads = measuring.threads(None, args.workers)
    rows = []
    for method in args.methods:
        task = {"workload": args.workload, "method": method, "rounds": args.rounds}
        answers = measuring.run(
            "processor_time_worker.py",
            task,
            exchange.commands(args.workers),
            threads,
            args.timeout,
        )
        rows.append(row_of(method, answers))
        print(rows[-1], flush=True)
    lines = [
        head(
            f"{args.workload}; {args.workers} workers, threads each: {threads}; "
            f"{args.rounds} rounds"
        ),
        "",
        *table(rows),
    ]
    publish(args.output, "processor time", COLUMNS, rows, lines)


if __name__ == "__main__":
    main()
