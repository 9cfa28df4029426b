"""Run the example with every method on two workers and write the table of results.

    python examples/compare_methods.py

rewrites the text between the two marker comments of examples/README.md.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "examples" / "README.md"
METHODS = (
    "none",
    "half_precision",
    "terngrad",
    "signsgd",
    "signum",
    "dist_ef_sgd",
    "dist_ef_block_sgd",
    "dist_ef_block_sgdm",
)
# No line is matched from its start: the launcher may put the worker's name there.
PATTERNS = {
    "learning_rate": r"examples a step, learning rate ([\d.e+-]+),",
    "accuracy": r"test accuracy: ([\d.]+)",
    "sent": r"bytes per step and worker: (\d+) sent",
    "received": r"bytes per step and worker: \d+ sent, (\d+) received",
    "ratio": r"compression ratio: ([\d.]+)",
}
WEIGHTS = r"worker \d+ of \d+: weights sha256 (\w+), data (\S+)"
COLUMNS = (
    "method",
    "learning rate",
    "seed",
    "epochs",
    "test accuracy",
    "bytes per step per worker",
    "ratio",
    "command",
)


def parse(output: str, workers: int) -> dict[str, str]:
    """Return the values that a run printed, by the keys of PATTERNS and ``data``.

    Raises:
      ValueError: if a line is missing, or the workers' weights or data differ.
    """
    values = {}
    for name, pattern in PATTERNS.items():
        found = re.search(pattern, output)
        if found is None:
            raise ValueError(f"The run printed no {name}. Received: {output}")
        values[name] = found[1]
    endings = re.findall(WEIGHTS, output)
    if len(endings) != workers or len(set(endings)) != 1:
        raise ValueError(
            f"{workers} workers should print equal weights and data. "
            f"Received: {endings}"
        )
    return values | {"data": endings[0][1]}


def run(method: str, workers: int, epochs: int, seed: int) -> tuple[str, str]:
    """Run the example; return the table's row and the data's name."""
    script = ["examples/fashion_mnist.py", "--method", method]
    script += ["--epochs", str(epochs), "--seed", str(seed)]
    print(f"{method} ...", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "tfgradcomp.launch", "--workers", str(workers), *script],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{method} failed:\n{done.stdout}\n{done.stderr}")
    values = parse(done.stdout + done.stderr, workers)
    command = shlex.join(["tfgradcomp-launch", "--workers", str(workers), *script])
    cells = (
        f"`{method}`",
        values["learning_rate"],
        str(seed),
        str(epochs),
        f"{100 * float(values['accuracy']):.2f} %",
        f"{int(values['sent']):,} sent, {int(values['received']):,} received",
        values["ratio"],
        f"`{command}`",
    )
    print(" | ".join(cells), flush=True)
    return f"| {' | '.join(cells)} |", values["data"]


def git(*arguments: str) -> str:
    """Return the output of git."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def processor() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = re.search(r"model name\s*: (.+)", cpuinfo.read_text())
        if model:
            return model[1]
    return platform.processor() or platform.machine()


def conditions(workers: str, threads: str, processors: tuple[str, ...] = ()) -> str:
    """Return date, commit, device, threads and versions, for the table's first line.

    Args:
        workers: Their number and kind.
        threads: Number of threads of each.
        processors: Names of those that measured; none: this machine's did.
    """
    commit = git("rev-parse", "--short", "HEAD")
    # The figures themselves change these, so that they do not count.
    written = (":!examples/README.md", ":!examples/results", ":!docs")
    if git("status", "--porcelain", "--", ".", *written):
        commit += " with uncommitted changes"
    cpu = " and ".join(processors) or processor()
    versions = {
        name.removesuffix("-cpu"): metadata.version(name)
        for name in ("tensorflow", "tensorflow-cpu", "keras")
        if any(metadata.distributions(name=name))
    }
    return (
        f"{datetime.date.today()}, commit {commit}; {workers} on one machine, "
        f"CPU {cpu}, {os.cpu_count()} logical cores, {threads} thread(s) per worker; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def replace_table(text: str, table: str, name: str = "results") -> str:
    """Return ``text`` with ``table`` between the two markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"The README should hold {begin} and then {end}.")
    return f"{before}{begin}\n{table}\n{end}{after}"


def write_table(table: str, name: str = "results"):
    """Put ``table`` into the README, between the markers of that name."""
    README.write_text(replace_table(README.read_text(), table, name))


def main():
    """Run all methods, then write the table, or nothing if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments = parser.parse_args()
    # The launcher's share of the cores, unless the user says otherwise.
    share = max(1, len(os.sched_getaffinity(0)) // arguments.workers)
    threads = os.environ.get("TF_NUM_INTRAOP_THREADS", str(share))
    measured_on = conditions(f"{arguments.workers} workers", threads)
    results = [
        run(method, arguments.workers, arguments.epochs, arguments.seed)
        for method in arguments.methods
    ]
    rows, sources = zip(*results, strict=True)
    if len(set(sources)) != 1:
        raise SystemExit(f"The runs used different data: {sources}")
    table = [
        f"Data: {sources[0]}. {measured_on}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *rows,
    ]
    write_table("\n".join(table))


if __name__ == "__main__":
    main()
