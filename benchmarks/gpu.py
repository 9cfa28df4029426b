"""Builds, verifies and measures the CUDA kernels on a GPU, in minutes: `make gpu`.

It takes Python, a C++ compiler and nvcc, and neither TensorFlow nor the package. Stages
are processes of their own, in the order in which they are worth most; where the time
is up, what is left is skipped and named. The exit status is 0 if all that ran agrees.

    python -m benchmarks.gpu                  # writes benchmarks/results/gpu.csv
    python -m benchmarks.gpu --output FOLDER  # writes gpu.csv and the logs there
    python -m benchmarks.gpu --emulate --output FOLDER   # the same way without a GPU
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.ops.cuda_library import (
    AS_LARGE_VECTORS,
    REPOSITORY,
    Checks,
    build_emulated,
    build_with_nvcc,
    load_build,
)

RESULTS = REPOSITORY / "benchmarks" / "results"
LOGS = REPOSITORY / "build" / "gpu"
AIM = 0.8  # Of the bandwidth of a copy.
LATE_BYTES = 1 << 28  # Set by the stream before each kernel: a tenth of a millisecond.

# What the tools of compute-sanitizer print in the end. initcheck says nothing here:
# all memory is set before a kernel runs.
SANITIZERS = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


class Stage(NamedTuple):
    """A process of this program.

    Attributes:
        name: What it does; the name of its log.
        arguments: The arguments of the process.
        says: What its log must have; an empty or cut-off log is no success.
        prefix: A command that runs the process.
        environment: Variables of the process.
        seconds: What it takes at least: with less left it is skipped.
    """

    name: str
    arguments: Sequence[str]
    says: Sequence[str]
    prefix: Sequence[str] = ()
    environment: dict = {}
    seconds: float = 20


def main(argv: list[str] | None = None) -> int:
    """Runs all stages, or one that a process of this program was started for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--output", type=Path, help="folder of gpu.csv and the logs")
    parser.add_argument("--minutes", type=float, default=7.5, help="of all stages")
    parser.add_argument("--commit", help="where this folder is no checkout of git")
    parser.add_argument(
        "--emulate", action="store_true", help="run everything in the emulator"
    )
    for stage in ("verify", "measure"):
        parser.add_argument(f"--{stage}", metavar="LIBRARY", help=argparse.SUPPRESS)
    for number in ("most", "guard", "late"):
        parser.add_argument(f"--{number}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--few", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--csv", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    if parsed.verify:
        checks = Checks(Path(parsed.verify).resolve())
        good, report = checks.verify(parsed.most, parsed.few, parsed.guard, parsed.late)
        print(report)
        return 0 if good else 1
    if parsed.measure:
        good, report = Checks(Path(parsed.measure).resolve()).measure(parsed.most)
        print(report)
        if good:
            parsed.csv.write_text(report)
        return 0 if good else 1
    return run_all(parsed)


def run_all(parsed: argparse.Namespace) -> int:
    """Builds, runs the stages and writes the table; returns the exit status."""
    ends = time.monotonic() + 60 * parsed.minutes
    logs, results = parsed.output or LOGS, parsed.output or RESULTS
    logs.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": datetime.date.today().isoformat(),
        "commit": parsed.commit or commit(),
        "driver": "emulated" if parsed.emulate else driver(),
    }
    build = load_build()
    try:
        shipped, few, facts["CUDA"] = build_all(build, parsed.emulate, logs)
    except (build.BuildError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: build: {error}")
        return 1
    print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n")
    left = ends - time.monotonic()
    print(f"built in {60 * parsed.minutes - left:.0f} s, logs in {logs}", flush=True)
    if Checks(shipped).gpu_count() == 0:
        print("FAILED: there is no GPU: cudaGetDeviceCount finds none")
        return 1
    failed = []
    tables = []
    for stage in stages(parsed.emulate, shipped, few, logs):
        left = ends - time.monotonic()
        if left < stage.seconds:
            print(f"skipped, {left:.0f} s are left: {stage.name}", flush=True)
            continue
        if not run(stage, logs, left):
            failed.append(stage.name)
        elif "--csv" in stage.arguments:
            tables.append(Path(stage.arguments[-1]))
            write(results / "gpu.csv", tables, facts)
    if failed:
        print("FAILED:", *failed, sep="\n  ")
    return 1 if failed or not tables else 0


def stages(emulate: bool, shipped: Path, few: Path, logs: Path) -> list[Stage]:
    """Returns what to run, with the most important first."""
    most, few_most, late = 1 << 21, 200_000, LATE_BYTES
    if emulate:
        most, few_most, late = 10_000, 1000, 0
    agree = (" calls, 0 differences",)

    def verify(name, library, seconds, *more, most=most, guard=256, **options):
        arguments = ["--verify", library, "--most", most, "--guard", guard, *more]
        arguments += ["--late", late]
        return Stage(
            name, [str(a) for a in arguments], agree, seconds=seconds, **options
        )

    def measure(size, seconds):
        target = logs / f"measured_{size}.csv"
        arguments = ["--measure", shipped, "--most", size, "--csv", target]
        says = ("MeanOfSparse one in=100,buckets",)  # The last call.
        name = f"measure {size} elements"
        return Stage(name, [str(a) for a in arguments], says, seconds=seconds)

    chosen = [
        verify("verify the kernels as they are installed", shipped, 20),
        measure(1000 if emulate else 1 << 24, 20),
        verify("verify small vectors as large ones", few, 20, most=few_most),
    ]
    if emulate:
        chosen += [
            verify("few shapes without guards", few, 20, "--few", most=200_000, guard=0)
        ]
        return chosen
    # The PTX is for GPUs of this capability and newer.
    if float(ask_gpu("compute_cap") or 0) >= 9:
        jit = {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"}
        name = "verify what the driver compiles"
        chosen.append(verify(name, shipped, 20, "--few", environment=jit))
    chosen.append(measure(1 << 26, 130))
    sanitizer = shutil.which(
        "compute-sanitizer",
        path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]),
    )
    if sanitizer is None:
        print("skipped, it is not there: compute-sanitizer", flush=True)
    for tool, summary in SANITIZERS.items() if sanitizer else ():
        stage = verify(tool, few, 20, "--few", most=10_000, guard=0)
        prefix = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        chosen.append(stage._replace(prefix=prefix, says=[*agree, summary]))
    return chosen


def build_all(build: ModuleType, emulate: bool, logs: Path) -> tuple[Path, Path, str]:
    """Builds the checks of the kernels as installed, and with few thread blocks."""
    jobs = len(os.sched_getaffinity(0))
    folders = [LOGS / name for name in ("shipped", "few")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    cpu = build.build_cpu_library(LOGS / "libcpu.so")
    if emulate:
        shipped = build_emulated(folders[0], cpu, jobs=jobs)
        few = build_emulated(folders[1], cpu, AS_LARGE_VECTORS, jobs)
        return shipped, few, "emulator"
    nvcc, reason = build.find_nvcc(for_others=True)
    if nvcc is None:
        raise RuntimeError(f"CUDA was {reason}")
    flags, built_with = build.cuda_flags(nvcc)
    # Registers and spills.
    shipped, said = build_with_nvcc(
        folders[0], cpu, nvcc, [*flags, "-Xptxas", "-v"], jobs
    )
    (logs / "ptxas.log").write_text(said)
    own = [flag for flag in flags if not flag.startswith("-gencode")]
    few, _ = build_with_nvcc(
        folders[1],
        cpu,
        nvcc,
        [*own, *AS_LARGE_VECTORS, "-arch=native", "-lineinfo"],
        jobs,
    )
    return shipped, few, built_with


def run(stage: Stage, logs: Path, seconds: float) -> bool:
    """Runs a stage, keeps what it says and returns whether it is a success."""
    log = logs / (stage.name.replace(" ", "_") + ".log")
    command = [*stage.prefix, sys.executable, "-m", "benchmarks.gpu", *stage.arguments]
    began = time.monotonic()
    reason = ""
    with open(log, "w") as file:
        try:
            status = subprocess.run(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **stage.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            status, reason = None, "the time is up"
    said = log.read_text(errors="replace")
    if status is not None and status != 0:
        reason = f"status {status}"
    for expected in stage.says:
        if not reason and expected not in said:
            reason = f"its log does not say '{expected}'"
    counted = re.search(r"^\d+ calls, \d+ differences", said, re.MULTILINE)
    taken = f"{time.monotonic() - began:.0f} s"
    print(
        f"{'FAILED' if reason else 'passed'}: {stage.name}",
        *filter(None, [reason, counted and counted[0], taken]),
        sep=", ",
        flush=True,
    )
    if reason:
        print("".join(f"    {line}\n" for line in said.splitlines()[-20:]), flush=True)
    return not reason


def write(target: Path, tables: Sequence[Path], facts: dict) -> None:
    """Writes the table of all measurements, and prints what falls below the aim."""
    rows: list[dict] = []
    for table in tables:
        with open(table, newline="") as file:
            rows += [{**row, **facts} for row in csv.DictReader(file)]
    with open(target, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with open(tables[-1], newline="") as file:
        latest = list(csv.DictReader(file))
    slow = [row for row in latest if float(row["of copy"]) < AIM]
    slow.sort(key=lambda row: float(row["of copy"]))
    print(f"{len(latest) - len(slow)} of {len(latest)} calls reach {AIM} of a copy's")
    print(f"bandwidth ({target}). The slowest:")
    for row in slow[:25]:
        print(f"    {row['of copy']}  {row['call']}, {row['blocks']}", flush=True)


def driver() -> str:
    """Returns the GPU's driver, as nvidia-smi names it, and what CUDA it runs."""
    runs = load_build().driver_version()
    supports = "no driver" if runs is None else f"CUDA {runs[0]}.{runs[1]}"
    named = ask_gpu("driver_version")
    return f"{named} ({supports})" if named else supports


def ask_gpu(fact: str) -> str:
    """Returns a fact about the first GPU, as nvidia-smi says it; "" without one."""
    query = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 else ""


def commit() -> str:
    """Returns the commit of this checkout, with a plus if it has been changed."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
