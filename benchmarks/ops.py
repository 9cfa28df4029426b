"""Time each op against memcpy in the same process and write the tables of README.md.

    python benchmarks/ops.py
    python benchmarks/ops.py --size 4194304 --threads 1 --output /tmp/results

One process a number of threads: TensorFlow makes its pool once. A round times each op,
right after a memcpy of as many floats or a loop in C that moves the bytes of the
error-feedback step; what is reported is the median over the rounds of the ratio of the
two, so that a machine that slows down for a while slows both. "0.5" reads: half as many
elements a second as memcpy copies.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from report import commit, processor, write_csv, write_table
from workloads import resnet_50, sizes

HERE = Path(__file__).resolve().parent
COLUMNS = ("op", "implementation", "threads", "allocator", "elements", "milliseconds")
COLUMNS += ("baseline", "ratio", "target")

# What a step of error feedback moves at the least: three vectors read, two written.
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


class Row(NamedTuple):
    """An op to time.

    Attributes:
        name: What the table calls it.
        make: Takes the module of ops, `native` or `reference`; returns the function and
            its arguments.
        target: The least ratio it ought to reach, or None.
        baseline: "memcpy" or "triad".
        in_python: Whether pure TensorFlow is timed, too.
    """

    name: str
    make: Callable
    target: float | None = None
    baseline: str = "memcpy"
    in_python: bool = True


def make_rows(size: int) -> list[Row]:
    """Returns what is timed, on vectors of `size` floats."""
    import numpy as np
    import tensorflow as tf

    from tfgradcomp.ops import SplitVector

    rng = np.random.default_rng(0)

    def normal():
        return tf.constant(rng.standard_normal(size, np.float32))

    def words(base, num_workers):
        digits = max(k for k in range(1, 33) if base**k <= 2**32)
        # Any word below base ** digits is one of `digits` codes.
        shape = [num_workers, -(-size // digits)]
        drawn = rng.integers(0, base**digits, shape, np.uint64)
        return tf.constant(drawn.astype(np.uint32).view(np.int32))

    def scales(*shape):
        return tf.constant(rng.random(shape, np.float32) + 0.5)

    x, m, e = normal(), normal(), normal()
    codes = tf.constant(rng.integers(0, 3, size, np.int32))
    signs_1, signs_8, signs_4 = words(2, 1), words(2, 8), words(2, 4)
    ternary_1, ternary_4 = words(3, 1), words(3, 4)
    nine_1, nine_4 = words(9, 1), words(9, 4)
    one = np.array([0, size])
    widths = sizes(resnet_50())
    while sum(widths) < size:
        widths *= 2
    bounds = np.minimum(np.cumsum([0, *widths]), size)
    layers = np.unique(bounds)
    limit, stream = tf.constant([2.5]), tf.constant([7, 3, 0], tf.int64)
    # Of r, a sum of two, one in a thousand outweighs 1.5 times their sum.
    moments, variance = tf.fill([size], 7.2), tf.fill([size], 7.2)
    shape = 4, -(-size // 1000)
    # Each of them somewhere among a thousand elements of its own.
    places = np.arange(0, size, 1000) + rng.integers(0, 1000, shape)
    sent = places + (rng.integers(0, 16, shape) << 28)
    sent = tf.constant(sent.astype(np.uint32).view(np.int32))
    ratio, true, false = tf.constant(0.9), tf.constant(True), tf.constant(False)
    scale = scales(1)
    buckets = np.append(np.arange(0, size, 2048), size)

    def levels(base, packed):
        zero = packed.shape[0] * (base - 1) // 2 if base > 2 else 1
        step = 1 if base > 2 else 2
        return lambda ops: (
            lambda w, s: ops.sum_levels(w, s, one, base, step, zero),
            (packed, scale),
        )

    def orq(ops):
        def encode(x, stream):
            found, nonfinite = ops.find_levels(x, buckets, "optimal", 9)
            return ops.pack_levels(x, found, buckets, stream), found, nonfinite

        return encode, (x, stream)

    def qsgd(ops):
        def encode(x, stream):
            largest = ops.block_statistics(x, buckets).maximum
            unit = tf.cast(largest, tf.float32)[:, tf.newaxis] / 4
            even = unit * tf.range(-4.0, 5.0)
            return ops.pack_levels(x, even, buckets, stream), unit

        return encode, (x, stream)

    def feedback(splits):
        return lambda ops: (
            lambda *args: ops.sign_error_feedback(*args[:3], 0.9, *args[3:], splits),
            (x, m, e, ratio, true),
        )

    tensors = tf.split(x, np.diff(layers))

    def of_tensors(function):
        """A function of the gradient: of its tensors, and of these joined."""
        return (
            lambda ops: (lambda *x: function(ops, SplitVector(x)), tensors),
            lambda ops: (lambda *x: function(ops, tf.concat(x, 0)), tensors),
        )

    signs_of_tensors, signs_of_joined = of_tensors(lambda ops, x: ops.pack_signs(x))
    feedback_of_tensors, feedback_of_joined = of_tensors(
        lambda ops, x: ops.sign_error_feedback(x, m, e, 0.9, ratio, true, layers)
    )

    def mean_to_tensors(ops):
        def step(w, s):
            return ops.mean_of_signs(w, s, one, np.diff(layers)).tensors

        return step, (signs_8, scales(8, 1))

    def mean_that_is_split(ops):
        def step(w, s):
            return tf.split(ops.mean_of_signs(w, s, one), np.diff(layers))

        return step, (signs_8, scales(8, 1))

    def feedback_of_single_ops(splits):
        def make(ops):
            def step(x, m, e, ratio, moving):
                m = 0.9 * m + x
                p = 0.9 * m + x + ratio * e
                mean = ops.block_statistics(p, splits).l1 / np.diff(splits)
                s = tf.cast(mean, tf.float32)
                signs = ops.pack_signs(p)
                sent = ops.mean_of_signs(signs[tf.newaxis], s[tf.newaxis], splits)
                return signs, s, m, tf.where(moving, p - sent, e)

            return step, (x, m, e, ratio, true)

        return make

    def ternary_of_single_ops(ops):
        from tfgradcomp.ops import reference

        def step(x, limit, stream):
            clipped = tf.clip_by_value(x, -limit, limit)
            kept = reference.uniform(stream, size) * limit < tf.abs(clipped)
            sign = tf.cast(tf.sign(clipped), tf.int32)
            return ops.pack_codes(tf.where(kept, sign, 0) + 1, 3)

        return step, (x, limit, stream)

    def mean_of_single_ops(ops):
        def step(w, s):
            total = 0.0
            for i in range(8):
                total += ops.mean_of_signs(w[i : i + 1], s[i : i + 1], one)
            return total / 8

        return step, (signs_8, scales(8, 1))

    return [
        Row("pack signs", lambda ops: (ops.pack_signs, (x,)), 1.5),
        Row("pack signs of layers' tensors", signs_of_tensors, in_python=False),
        Row("the same, joined first", signs_of_joined, in_python=False),
        Row("unpack signs to floats", levels(2, signs_1), 1.4),
        Row(
            "pack base 3 from codes",
            lambda ops: (lambda c: ops.pack_codes(c, 3), (codes,)),
            1.2,
        ),
        Row("unpack base 3 to floats", levels(3, ternary_1), 1.2),
        Row(
            "unpack base 3 to codes",
            lambda ops: (lambda w: ops.unpack_codes(w, 3, size), (ternary_1,)),
        ),
        Row("unpack base 9 to floats", levels(9, nine_1)),
        Row("sum of 4 base-3 payloads to floats", levels(3, ternary_4)),
        Row(
            "sum of 4 base-3 payloads to words",
            lambda ops: (lambda w: ops.sum_codes(w, 3, size), (ternary_4,)),
        ),
        *(
            Row(
                f"base 3 to base {sum_base}",
                lambda ops, sum_base=sum_base: (
                    lambda w: ops.sum_codes(w, 3, size, sum_base),
                    (ternary_1,),
                ),
            )
            for sum_base in (5, 9, 17)
        ),
        Row(
            "base 2 to base 5",
            lambda ops: (lambda w: ops.sum_codes(w, 2, size, 5), (signs_1,)),
        ),
        Row(
            "clip, ternarise and pack",
            lambda ops: (
                lambda x, s, r: ops.pack_ternary(x, s, s, one, r),
                (x, limit, stream),
            ),
            0.5,
        ),
        Row("the same of single ops", ternary_of_single_ops, in_python=False),
        Row(
            "mean of 8 sign payloads",
            lambda ops: (
                lambda w, s: ops.mean_of_signs(w, s, one),
                (signs_8, scales(8, 1)),
            ),
            0.6,
        ),
        Row("the same of single ops ", mean_of_single_ops, in_python=False),
        Row("the same to layers' tensors", mean_to_tensors, in_python=False),
        Row("the same, split at last", mean_that_is_split, in_python=False),
        Row(
            "majority vote of 8 sign payloads",
            lambda ops: (
                lambda w, r: ops.majority_vote(w, size, 2, 2, 0, r),
                (signs_8, stream),
            ),
        ),
        Row(
            "find levels, ORQ-9",
            lambda ops: (
                lambda x: ops.find_levels(x, buckets, "optimal", 9),
                (x,),
            ),
        ),
        Row("clipless ORQ-9 encode", orq),
        Row("QSGD-9 encode", qsgd),
        Row(
            "mean of 4 base-9 payloads of levels",
            lambda ops: (
                lambda w, table: ops.mean_of_levels(w, table, buckets),
                (nine_4, tf.sort(scales(4, len(buckets) - 1, 9))),
            ),
        ),
        Row(
            "statistics of layers",
            lambda ops: (lambda x: ops.block_statistics(x, layers), (x,)),
        ),
        Row(
            "moving average and pack signs",
            lambda ops: (
                lambda *args: ops.pack_momentum_signs(*args[:2], 0.9, *args[2:]),
                (x, m, false, stream),
            ),
        ),
        Row("error feedback, layers", feedback(layers), 0.8, "triad"),
        Row(
            "error feedback, layers' tensors",
            feedback_of_tensors,
            baseline="triad",
            in_python=False,
        ),
        Row(
            "the same, joined first ",
            feedback_of_joined,
            baseline="triad",
            in_python=False,
        ),
        Row("error feedback, one block", feedback(one), 0.8, "triad"),
        Row(
            "error feedback, layers, of single ops",
            feedback_of_single_ops(layers),
            baseline="triad",
            in_python=False,
        ),
        Row(
            "server's error feedback of 4 payloads",
            lambda ops: (
                lambda *args: ops.mean_sign_error_feedback(*args, layers),
                (signs_4, scales(4, len(layers) - 1), e, ratio, true),
            ),
        ),
        Row(
            "its first half: signs and sums",
            lambda ops: (
                lambda *args: ops.mean_sign_sums(*args, layers),
                (signs_4, scales(4, len(layers) - 1), e, ratio),
            ),
        ),
        Row(
            "its second half: the residual",
            lambda ops: (
                lambda *args: ops.mean_sign_residual(*args, layers),
                (
                    signs_4,
                    scales(4, len(layers) - 1),
                    e,
                    ratio,
                    true,
                    signs_1[0],
                    scales(len(layers) - 1),
                ),
            ),
        ),
        Row(
            "pack what is unambiguous, 1 in 1000",
            lambda ops: (
                lambda *args: ops.pack_unambiguous(*args, 1.5, 0.999, layers),
                (x, moments, e, variance),
            ),
            baseline="triad",
        ),
        Row(
            "pack what is over a threshold, 1 in 1000",
            lambda ops: (
                lambda *args: ops.pack_over_threshold(*args, 3.0, 1.5, 0.999),
                (x, moments, e, variance),
            ),
            baseline="triad",
        ),
        Row(
            "mean of 4 sparse payloads, 1 in 1000 each",
            lambda ops: (
                lambda w, s: ops.mean_of_sparse(w, s, layers),
                (sent, scales(4, len(layers) - 1)),
            ),
        ),
    ]


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
    from tfgradcomp.ops import native, reference

    buffers = [np.ones(size, np.float32) for _ in range(5)]
    pointers = [ctypes.c_void_p(b.ctypes.data) for b in buffers]
    with tempfile.TemporaryDirectory() as folder:
        triad = compile_triad(folder)
    moves = {
        "memcpy": lambda: ctypes.memmove(pointers[0], pointers[1], 4 * size),
        "triad": lambda: triad(*pointers, ctypes.c_long(size), ctypes.c_float(0.5)),
    }

    def seconds(call):
        # Twice: what the one before left in the caches to be written is not its own.
        call()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def call_of(row, ops):
        function, arguments = row.make(ops)
        # One op is called as it is, so that nothing but the kernel is timed; several
        # go through a graph, as they do in training.
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
        threads: Of TensorFlow's pool.
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


def table(results: list[dict], threads: list[int], size: int, device: str) -> list[str]:
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
    head = ["op", "against", "target", *(f"native, {n} threads" for n in threads)]
    head = [cell.replace(" 1 threads", " 1 thread") for cell in head]
    head += [f"{threads[-1]} / {threads[0]}", "default allocator", "pure TensorFlow"]
    lines = [
        f"{device}; {size} elements; {datetime.date.today()}, commit {commit()}. "
        f"memcpy {moved['memcpy']:.1f} ms ({copied:.1f} GB/s read and written), "
        f"triad {moved['triad']:.1f} ms.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
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
    lines = table(results, args.threads, args.size, processor())
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
