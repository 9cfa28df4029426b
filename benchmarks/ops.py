"""Time each op against memcpy in the same process and write the tables of README.md.

    python benchmarks/ops.py
    python benchmarks/ops.py --size 4194304 --threads 1 --output /tmp/results

Each number of threads has a process of its own, because TensorFlow makes its pool of
threads only once. A round times each op right after a memcpy of as many floats, or
after a loop in C that moves the bytes of the error-feedback step. The result is the
median over the rounds of the ratio of the two times, so that a machine that slows down
for a while slows down both. A ratio of 0.5 means half as many elements a second as
memcpy copies.

op_rows.py says what is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from report import head, write_csv, write_table

HERE = Path(__file__).resolve().parent
COLUMNS = ("op", "implementation", "threads", "allocator", "elements", "milliseconds")
COLUMNS += ("baseline", "ratio", "target")

# The least that a step of error feedback moves: it reads three vectors and writes two.
TRIAD = """
extern "C" void triad(const float* x, const float* m, const float* e, float* a,
                      float* b, long size, float s) {
  for (long i = 0; i < size; ++i) {
    const float value = s * m[i] + x[i];
    a[i] = value;
    b[i] = s * value + e[i];
  }
}
"""


def compile_triad(folder: str) -> Callable:
    """Compiles the loop in C."""
    library = os.path.join(folder, "triad.so")
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run(
        [*compiler, "-O3", "-shared", "-fPIC", "-x", "c++", "-", "-o", library],
        input=TRIAD,
        text=True,
        check=True,
    )
    return ctypes.CDLL(library).triad


def time_rows(size: int, threads: int, rounds: int, in_python: bool) -> list[dict]:
    """Times all rows in this process."""
    import numpy as np
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # Imported after the size of the pool is set: an import may start TensorFlow.
    from op_rows import make_rows

    from tfgradcomp.ops.registry import OPERATIONS

    native, reference = (
        SimpleNamespace(**{name: getattr(o, kind) for name, o in OPERATIONS.items()})
        for kind in ("native", "reference")
    )

    buffers = [np.ones(size, np.float32) for _ in range(5)]
    pointers = [ctypes.c_void_p(b.ctypes.data) for b in buffers]
    with tempfile.TemporaryDirectory() as folder:
        triad = compile_triad(folder)
    moves = {
        "memcpy": lambda: ctypes.memmove(pointers[0], pointers[1], 4 * size),
        "triad": lambda: triad(*pointers, ctypes.c_long(size), ctypes.c_float(0.5)),
    }

    def seconds(call):
        # Only the second call is timed. The first one waits until the caches have
        # written back what the call before it left there.
        call()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def call_of(row, ops):
        function, arguments = row.make(ops)
        # A single op is called as it is, so that nothing but the kernel is timed. Two
        # or more ops go through a graph, as they do in training.
        if ops is reference or not row.in_python:
            function = tf.function(function, autograph=False)
        return lambda: function(*arguments)

    results = []
    rows = make_rows(size)
    for name, ops, times in (
        ("native", native, rounds),
        ("pure TensorFlow", reference, min(rounds, 3)),
    ):
        if name != "native" and not in_python:
            continue
        timed = [row for row in rows if name == "native" or row.in_python]
        calls = [call_of(row, ops) for row in timed]
        for call in [*moves.values(), *calls]:
            call()
        taken = [[] for _ in timed]
        for _ in range(times):
            for row, call, pairs in zip(timed, calls, taken, strict=True):
                pairs.append((seconds(moves[row.baseline]), seconds(call)))
        for row, pairs in zip(timed, taken, strict=True):
            ratio = statistics.median(base / own for base, own in pairs)
            own = statistics.median(own for _, own in pairs)
            results.append(
                {
                    "op": row.name,
                    "implementation": name,
                    "threads": threads,
                    "elements": size,
                    "milliseconds": round(1e3 * own, 3),
                    "baseline": row.baseline,
                    "ratio": round(ratio, 3),
                    "target": row.target,
                }
            )
        for baseline, move in moves.items():
            own = statistics.median(seconds(move) for _ in range(times))
            results.append(
                {
                    "op": baseline,
                    "implementation": "C",
                    "threads": 1,
                    "elements": size,
                    "milliseconds": round(1e3 * own, 3),
                    "baseline": baseline,
                    "ratio": 1.0,
                }
            )
    return results


def in_child(args: argparse.Namespace, threads: int, kept: bool) -> list[dict]:
    """Runs `time_rows` in a process of its own.

    Args:
        args: The options.
        threads: The number of threads of TensorFlow's pool.
        kept: Whether TensorFlow keeps the memory of large results for the next ones.
            By default it gives each back to the system, and a new one costs a fault
            for every page.
    """
    environment = {
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "true" if kept else "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, __file__, "--child", "--size", str(args.size)]
    command += ["--rounds", str(args.rounds), "--threads", str(threads)]
    if not kept:
        command.append("--native-only")
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    results = json.loads(done.stdout.splitlines()[-1])
    return [{**r, "allocator": "kept" if kept else "default"} for r in results]


def table(results: list[dict], threads: list[int], size: int) -> list[str]:
    """Returns the lines of the Markdown table."""
    found = {
        (r["op"], r["implementation"], r["threads"], r["allocator"]): r
        for r in results
        if r["implementation"] != "C"
    }
    names = list(dict.fromkeys(key[0] for key in found))
    moved = {
        name: statistics.median(r["milliseconds"] for r in results if r["op"] == name)
        for name in ("memcpy", "triad")
    }
    copied = 8 * size / moved["memcpy"] / 1e6
    titles = ["op", "against", "target", *(f"native, {n} threads" for n in threads)]
    titles = [cell.replace(" 1 threads", " 1 thread") for cell in titles]
    titles += [f"{threads[-1]} / {threads[0]}", "default allocator", "pure TensorFlow"]
    lines = [
        f"{head(f'{size} elements')} "
        f"memcpy {moved['memcpy']:.1f} ms ({copied:.1f} GB/s read and written), "
        f"triad {moved['triad']:.1f} ms.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for name in names:
        first = found[name, "native", threads[0], "kept"]
        ratios = [found[name, "native", n, "kept"]["ratio"] for n in threads]
        faults = found[name, "native", threads[0], "default"]["ratio"]
        python = found.get((name, "pure TensorFlow", threads[0], "kept"))
        cells = [
            name.strip(),
            first["baseline"],
            "" if first["target"] is None else f"{first['target']}",
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{ratios[-1] / ratios[0]:.2f}" if len(ratios) > 1 else "",
            f"{faults:.2f}",
            "" if python is None else f"{python['ratio']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2**24, help="floats of a vector")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, help="folder; default: this one, README.md included"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--native-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        times = time_rows(args.size, args.threads[0], args.rounds, not args.native_only)
        print(json.dumps(times))
        return
    results = []
    for threads in args.threads:
        results += in_child(args, threads, kept=True)
    results += in_child(args, args.threads[0], kept=False)
    lines = table(results, args.threads, args.size)
    folder = args.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "ops.csv", COLUMNS, results)
    print("\n".join(lines))
    if args.output is not None:
        (folder / "ops.md").write_text("\n".join([*lines, ""]))
        return
    write_table(HERE / "README.md", "ops", lines)


if __name__ == "__main__":
    main()
