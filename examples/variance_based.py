"""Train a VGG-like network on Fashion-MNIST with the sparse methods, by two optimizers.

    tfgradcomp-launch --workers 2 examples/variance_based.py
    tfgradcomp-launch --workers 2 examples/variance_based.py --methods none variance-1

The settings follow Table 1 of Tsuzuku, Imachi and Akiba, Variance-based Gradient
Compression for Efficient Distributed Deep Learning, 2018. The workers are on one
machine and train one run after the other. The script appends each run's row to
examples/results/variance_based.csv; started again, it trains the missing runs. At the
end it draws the plot beside the rows, and rewrites the text between its marker comments
in examples/README.md.
"""

import argparse
import csv
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import compare_methods
import data
import keras
import models
import tensorflow as tf

import tfgradcomp

BATCH_SIZE = 64
# Of momentum SGD: the paper's 0.05 a worker.
LEARNING_RATE = 0.1
RESULTS = compare_methods.ROOT / "examples" / "results"
OPTIMIZERS = {"adam": "Adam", "sgd": "Momentum SGD"}
# Wrapper, its arguments, and what the paper reports on CIFAR-10: accuracy and ratio,
# with Adam and with momentum SGD. QSGD's 2 and 3 bits besides the sign are 7 and 15
# levels.
METHODS = {
    "none": (None, {}, (88.1, 1), (91.7, 1)),
    "variance-1": ("VarianceBased", {"alpha": 1.0}, (88.9, 120.7), (90.3, 52.4)),
    "variance-1.5": ("VarianceBased", {"alpha": 1.5}, (88.9, 453.3), (89.6, 169.2)),
    "variance-2": ("VarianceBased", {"alpha": 2.0}, (88.9, 913.4), (88.4, 383.6)),
    "strom-0.001": ("Strom", {"threshold": 0.001}, (62.8, 88.5), (84.8, 6.5)),
    "strom-0.01": ("Strom", {"threshold": 0.01}, (85.0, 230.1), (10.6, 990.7)),
    "strom-0.1": ("Strom", {"threshold": 0.1}, (88.0, 6942.8), (71.6, 8485.0)),
    "hybrid-0.01": ("Hybrid", {"threshold": 0.01}, (85.0, 1942.2), (87.6, 983.9)),
    "hybrid-0.1": ("Hybrid", {"threshold": 0.1}, (88.2, 12822.4), (87.1, 12396.8)),
    "QSGD-7": (
        "QSGD",
        {"levels": 7, "block_size": 128, "norm": "l2"},
        (88.8, 12.3),
        (90.8, 6.6),
    ),
    "QSGD-15": (
        "QSGD",
        {"levels": 15, "block_size": 512, "norm": "l2"},
        (87.4, 14.4),
        (91.4, 7.0),
    ),
}


class Settings(NamedTuple):
    """Settings that all rows of a table share."""

    images: int
    epochs: int
    seed: int
    workers: int
    data: str
    commit: str


class Result(NamedTuple):
    """Test accuracy and compression ratios of a run.

    Attributes:
        accuracy: Of all test images, in percent.
        ratio: The paper's: all elements divided by sent elements, mean of the steps.
        bytes_ratio: Bytes of a float32 ring all-reduce divided by a worker's bytes.
    """

    accuracy: float
    ratio: float
    bytes_ratio: float


def make_optimizer(inner: str, method: str, steps: int, seed: int):
    """Return Adam, or SGD whose rate falls to 0, wrapped by the method."""
    if inner == "adam":
        optimizer = keras.optimizers.Adam()
    else:
        schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    wrapper, arguments, *_ = METHODS[method]
    if wrapper is None:
        # Stock Keras cannot fit on several workers; the wrappers enable this.
        tfgradcomp.enable_multi_worker_fit()
        return optimizer
    return getattr(tfgradcomp, wrapper)(
        optimizer,
        # "auto" would notice that one machine needs no compression.
        transport="all_gather",
        # As in the paper, where small variables are compressed like all others.
        min_size=0,
        seed=seed,
        # The accuracy of a diverging run is a result as well.
        nonfinite="skip",
        **arguments,
    )


def ratios(optimizer) -> tuple[float, float]:
    """Return a result's two ratios."""
    if not hasattr(optimizer, "traffic"):
        return 1.0, 1.0
    traffic = optimizer.traffic
    elements = traffic.elements_compressed + traffic.elements_plain
    # A ring passes every element on 2(N - 1) times, 1/N of the vector at a time.
    ring = 2 * (traffic.num_workers - 1) / traffic.num_workers * 4 * elements
    moved = traffic.bytes_sent + traffic.bytes_received
    return traffic.ratio, 2 * ring / moved


def train(inner: str, method: str, strategy, pairs, settings: Settings) -> Result:
    """Train a new model; the seed decides weights, order and rounding."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(settings.seed)
    batches = data.batches(pairs[0], BATCH_SIZE * settings.workers, settings.seed)
    with strategy.scope():
        model = models.make_vgg()
        optimizer = make_optimizer(
            inner, method, settings.epochs * len(batches), settings.seed
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(batches, epochs=settings.epochs, verbose=0, shuffle=False)
    _, accuracy = model.evaluate(data.batches(pairs[1], 1000), verbose=0)
    return Result(100 * accuracy, *ratios(optimizer))


def read_rows(path: Path, settings: Settings) -> dict[tuple[str, str], Result]:
    """Return the results with these settings, by optimizer and method."""
    if not path.exists():
        return {}
    expected = {name: str(value) for name, value in settings._asdict().items()}
    with open(path, newline="") as file:
        return {
            (row["optimizer"], row["method"]): Result(
                *(float(row[name]) for name in Result._fields)
            )
            for row in csv.DictReader(file)
            if expected.items() <= row.items()
        }


def write_rows(path: Path, settings: Settings, results: dict) -> None:
    """Write the results; rows with other settings are deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ("optimizer", "method", *Result._fields, *Settings._fields)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for (inner, method), result in results.items():
            figures = (f"{value:.6g}" for value in result)
            writer.writerow([inner, method, *figures, *settings])


def tables(results: dict[tuple[str, str], Result]) -> list[str]:
    """Return the lines of a table for each optimizer."""
    lines = []
    for index, (inner, title) in enumerate(OPTIMIZERS.items()):
        found = {m: results[inner, m] for m in METHODS if (inner, m) in results}
        if not found:
            continue
        lines += [
            "",
            f"| {title} | test accuracy, % | less none | paper, less none | ratio | "
            "paper's ratio | ratio of bytes |",
            "|---" * 7 + "|",
        ]
        none, paper_none = found.get("none"), METHODS["none"][2 + index][0]
        for method, result in found.items():
            less = f"{result.accuracy - none.accuracy:+.2f}" if none else ""
            accuracy, ratio = METHODS[method][2 + index]
            lines.append(
                f"| {method} | {result.accuracy:.2f} | {less} | "
                f"{accuracy - paper_none:+.1f} | {result.ratio:,.1f} | {ratio:,.1f} | "
                f"{result.bytes_ratio:,.1f} |"
            )
    return lines


def plot(path: Path, results: dict[tuple[str, str], Result]) -> None:
    """Draw accuracy over the ratio of bytes, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib here, so no plot: pip install matplotlib", file=sys.stderr)
        return
    trained = [inner for inner in OPTIMIZERS if any(inner == key[0] for key in results)]
    panels = Figure(figsize=(5.5 * len(trained), 4.5)).subplots(
        1, len(trained), sharex=True, squeeze=False
    )[0]
    families = list(dict.fromkeys(method.partition("-")[0] for method in METHODS))
    for axes, inner in zip(panels, trained, strict=True):
        for i, family in enumerate(families):
            axes.plot([], [], "o", color=f"C{i}", label=family)
        for (other, method), result in results.items():
            if other != inner:
                continue
            family, _, parameter = method.partition("-")
            point = result.bytes_ratio, result.accuracy
            axes.plot(*point, "o", color=f"C{families.index(family)}")
            axes.annotate(parameter, point, (5, 5), textcoords="offset points")
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(OPTIMIZERS[inner])
        axes.set_xlabel("bytes of float32 over those moved")
        axes.set_ylabel("test accuracy, %")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    panels[0].figure.savefig(path, bbox_inches="tight", dpi=120)


def parse_arguments():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder; default: results, README")
    return parser.parse_args()


def main():
    """Train the missing runs, one after the other; worker 0 writes."""
    arguments = parse_arguments()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    if workers < 2:
        raise SystemExit(
            "One worker sends nothing. Expected: two or more, as in: "
            "tfgradcomp-launch --workers 2 examples/variance_based.py"
        )
    is_first = strategy.cluster_resolver.task_id == 0
    loaded = data.load()
    pairs, source = data.first(loaded, arguments.images), loaded.source
    settings = Settings(
        arguments.images,
        arguments.epochs,
        arguments.seed,
        workers,
        source,
        compare_methods.git("rev-parse", "--short", "HEAD"),
    )
    conditions = compare_methods.conditions(
        f"{workers} workers", os.environ.get("TF_NUM_INTRAOP_THREADS", "all")
    )
    folder = arguments.output or RESULTS
    path = folder / "variance_based.csv"
    # All workers read it before the first run's end, which they reach together.
    results = read_rows(path, settings)
    for inner in arguments.optimizers:
        for method in arguments.methods:
            if (inner, method) in results:
                continue
            began = time.monotonic()
            result = train(inner, method, strategy, pairs, settings)
            results[inner, method] = result
            if is_first:
                write_rows(path, settings, results)
                print(
                    f"{inner}, {method}: {result.accuracy:.2f} %, ratio "
                    f"{result.ratio:.1f}, of bytes {result.bytes_ratio:.1f}, "
                    f"{time.monotonic() - began:.0f} s",
                    flush=True,
                )
    if not is_first:
        return
    lines = [
        f"Data: {source}, {settings.images} images; {settings.epochs} epochs; seed "
        f"{settings.seed}. {conditions}.",
        *tables(results),
    ]
    print("\n".join(lines), flush=True)
    plot(folder / "variance_based.png", results)
    if arguments.output is None:
        compare_methods.write_table("\n".join(lines), "variance based")


if __name__ == "__main__":
    main()
