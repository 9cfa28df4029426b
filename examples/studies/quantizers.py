"""Train a small ResNet on Fashion-MNIST with every quantizer, several times.

    python examples/accuracy_ladder.py
    python examples/accuracy_ladder.py --studies ladder --seeds 0 --methods FP ORQ-3

One worker that quantizes its own gradients, in the manner of Xu, Huo and Huang, Optimal
Gradient Quantization Condition for Communication-Efficient Distributed Training, 2019:

    ladder     all methods (their Table 2)
    buckets    sizes of buckets (their Table 3)
    clipping   gradients clipped to c deviations, the rate warming up (their Table 4)
    rates      the learning rate of full precision, which all methods take
    workers    on several workers, which share the batch; ORQ clipped (their Table 5)

The last one runs only if it is asked for, on virtual workers:

    python examples/accuracy_ladder.py --studies workers --workers 4

Each study rewrites what stands between its marker comments in examples/README.md.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import compare_methods
import data
import keras
import models
import tensorflow as tf

import tfgradcomp

sys.path.insert(0, str(Path(__file__).parent / "studies"))
from study import interval_text  # noqa: E402

BATCH_SIZE = 128
LEARNING_RATE = 0.1
# The share of the steps in which the rate rises from a tenth: 5 of 200 epochs there.
WARM_UP = 0.1
# Wrapper, its arguments, and the accuracy that the paper reports in Table 2: ResNet-56,
# CIFAR-100.
METHODS = {
    "FP": (None, {}, 72.66),
    "BinGrad-pb": ("BinGrad", {"variant": "pb"}, 67.20),
    "BinGrad-b": ("BinGrad", {"variant": "b"}, 68.53),
    "scaled sign": ("ScaledSign", {}, 67.81),
    "QSGD-3": ("QSGD", {"levels": 3}, 64.35),
    "ORQ-3": ("ORQ", {"levels": 3}, 67.02),
    "QSGD-5": ("QSGD", {"levels": 5}, 69.42),
    "ORQ-5": ("ORQ", {"levels": 5}, 70.34),
    "Linear-5": ("LinearQuantization", {"levels": 5}, 66.93),
    "QSGD-9": ("QSGD", {"levels": 9}, 69.52),
    "ORQ-9": ("ORQ", {"levels": 9}, 72.37),
    "Linear-9": ("LinearQuantization", {"levels": 9}, 68.62),
    # Clipped to 2.5 deviations, as its own paper has it; not in Table 2.
    "TernGrad": ("TernGrad", {}, None),
}
BUCKET_SIZES = (128, 512, 2048, 8192, 32768)
# Table 3: ResNet-110, CIFAR-10.
PAPER_BUCKETS = {
    "QSGD-3": (90.86, 90.23, 89.37, 87.87, 85.63),
    "ORQ-3": (91.66, 90.92, 90.18, 88.86, 87.08),
}
CLIP_FACTORS = (None, 1.7, 2.5)
# Table 4: what c = 1.7 and c = 2.5 lose of full precision's accuracy, ResNet-110,
# CIFAR-10.
PAPER_CLIPPING = {
    "ORQ-3": (-0.35, -1.14),
    "ORQ-5": (-0.18, -1.06),
    "ORQ-9": (0.51, -0.99),
}
# Table 5: ResNet-50, ImageNet, four workers, buckets of 512.
PAPER_WORKERS = {
    "FP": 75.82,
    "TernGrad": 72.62,
    "ORQ-3": 73.92,
    "QSGD-5": 73.80,
    "ORQ-5": 75.05,
    "QSGD-9": 74.12,
    "ORQ-9": 75.39,
}
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)


class Run(NamedTuple):
    """What is trained, but for the seed."""

    method: str
    block_size: int = 2048
    clip_factor: float | None = None
    warms_up: bool = False
    learning_rate: float = LEARNING_RATE


class Result(NamedTuple):
    """Test accuracy in percent, and bits an element that a worker sends."""

    accuracy: float
    bits: float


STUDIES = {
    "ladder": [Run(method) for method, (*_, paper) in METHODS.items() if paper],
    "buckets": [Run(m, size) for m in PAPER_BUCKETS for size in BUCKET_SIZES],
    "clipping": [
        Run("FP", warms_up=True),
        *(
            Run(method, clip_factor=c, warms_up=True)
            for method in PAPER_CLIPPING
            for c in CLIP_FACTORS
        ),
    ],
    "rates": [Run("FP", learning_rate=rate) for rate in RATES],
    "workers": [
        Run(method, 512, 1.7 if method.startswith("ORQ") else None)
        for method in PAPER_WORKERS
    ],
}


def make_optimizer(run: Run, steps: int, seed: int):
    """Return SGD with momentum, its rate falling to 0, wrapped by the method."""
    warm_up = int(WARM_UP * steps) if run.warms_up else 0
    schedule = keras.optimizers.schedules.CosineDecay(
        run.learning_rate / 10 if warm_up else run.learning_rate,
        steps - warm_up,
        warmup_target=run.learning_rate if warm_up else None,
        warmup_steps=warm_up,
    )
    sgd = keras.optimizers.SGD(schedule, momentum=0.9)
    wrapper, arguments, _ = METHODS[run.method]
    if wrapper is None:
        return sgd
    if run.clip_factor is not None:
        arguments = {**arguments, "clip_factor": run.clip_factor}
    return getattr(tfgradcomp, wrapper)(
        sgd,
        block_size=run.block_size,
        # "auto" would find that one worker needs no compression.
        transport="all_gather",
        # As in the paper, where small variables are quantized like all others.
        min_size=0,
        seed=seed,
        # A run that diverges has the accuracy that it has.
        nonfinite="skip",
        **arguments,
    )


def load(images: int):
    """Return the first images for training, as many of 10,000 for testing, a name."""
    source = data.load()
    pairs = []
    for dataset, count in ((source.train, images), (source.test, min(images, 10_000))):
        pairs.append(tf.data.Dataset.from_tensor_slices(data.arrays(dataset, count)))
    return *pairs, source.source


def train(run: Run, seed: int, pairs, epochs: int, strategy) -> Result:
    """Train a new model; the seed decides weights, order and rounding."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    batches = data.batches(pairs[0], BATCH_SIZE, seed)
    with strategy.scope():
        model = models.make_resnet()
        optimizer = make_optimizer(run, epochs * len(batches), seed)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(batches, epochs=epochs, verbose=0, shuffle=False)
    _, accuracy = model.evaluate(data.batches(pairs[1], 1000), verbose=0)
    bits = 32.0
    if hasattr(optimizer, "traffic"):
        bits = optimizer.traffic.bits_per_element_up
    return Result(100 * accuracy, bits)


def train_all(runs: list[Run], seed: int, images: int, epochs: int, workers: int):
    """Return the result of each run with one seed, and the name of the data."""
    strategy = tf.distribute.get_strategy()
    if workers > 1:
        strategy = tfgradcomp.virtual_workers(workers)
        tfgradcomp.enable_multi_worker_fit()
    *pairs, source = load(images)
    results = {}
    for run in runs:
        results[run] = train(run, seed, pairs, epochs, strategy)
        print(f"seed {seed}: {run}: {results[run].accuracy:.2f} %", flush=True)
    return results, source


def mean(results: list[Result]) -> float:
    """Return the mean accuracy over the seeds."""
    return statistics.mean(result.accuracy for result in results)


def spread(results: list[Result]) -> str:
    """Return mean, and the smallest and largest accuracy of the seeds."""
    found = [result.accuracy for result in results]
    return f"{mean(results):.2f} ({min(found):.2f} to {max(found):.2f})"


def ladder_table(results: dict[Run, list[Result]]) -> list[str]:
    """Return the lines of the first study's table."""
    papers = {method: paper for method, (*_, paper) in METHODS.items()}
    return steps_table(results, papers, Run("FP"))


def workers_table(results: dict[Run, list[Result]]) -> list[str]:
    """Return the lines of the table of several workers."""
    return steps_table(results, PAPER_WORKERS, Run("FP", 512))


def steps_table(results, papers: dict[str, float], plain: Run) -> list[str]:
    """Return the lines of a table with a row for each method, and the paper's.

    What a method has less than full precision is taken seed by seed: the same weights
    to begin with, and batches. It has a 95 % interval by Student's t.
    """
    lines = [
        "| method | bits an element | test accuracy, % | less FP | paper, less FP |",
        "|---|---|---|---|---|",
    ]
    full = results.get(plain)
    for run, found in results.items():
        less = ""
        if full and run != plain:
            pairs = zip(found, full, strict=True)
            differences = [own.accuracy - other.accuracy for own, other in pairs]
            less = interval_text(differences, "+")
        paper = papers[run.method] - papers["FP"]
        lines.append(
            f"| {run.method} | {found[0].bits:.2f} | {spread(found)} | {less} | "
            f"{paper:+.2f} |"
        )
    return lines


def buckets_table(results: dict[Run, list[Result]]) -> list[str]:
    """Return the lines of the second study's table."""
    lines = [
        f"| method | {' | '.join(map(str, BUCKET_SIZES))} |",
        "|---" * (1 + len(BUCKET_SIZES)) + "|",
    ]
    for method, paper in PAPER_BUCKETS.items():
        found = [results.get(Run(method, size)) for size in BUCKET_SIZES]
        if not all(found):
            continue
        lines.append(f"| {method} | {' | '.join(map(spread, found))} |")
        lines.append(f"| paper's | {' | '.join(f'{value:.2f}' for value in paper)} |")
    return lines


def clipping_table(results: dict[Run, list[Result]]) -> list[str]:
    """Return the lines of the third study's table."""
    titles = ["not clipped", *(f"c = {c}" for c in CLIP_FACTORS[1:])]
    lines = [f"| method | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    full = results.get(Run("FP", warms_up=True))
    if full:
        lines.append(f"| FP | {spread(full)} |{' |' * len(titles[1:])}")
    for method, paper in PAPER_CLIPPING.items():
        runs = [Run(method, clip_factor=c, warms_up=True) for c in CLIP_FACTORS]
        found = [results.get(run) for run in runs]
        if not all(found):
            continue
        lines.append(f"| {method} | {' | '.join(map(spread, found))} |")
        if full:
            less = [f"{mean(each) - mean(full):+.2f}" for each in found]
            lines.append(f"| less FP | {' | '.join(less)} |")
            figures = " | ".join(f"{loss:+.2f}" for loss in paper)
            lines.append(f"| paper, less FP | | {figures} |")
    return lines


def rates_table(results: dict[Run, list[Result]]) -> list[str]:
    """Return the lines of the last study's table."""
    rates = [f"{run.learning_rate:g}" for run in results]
    return [
        f"| learning rate | {' | '.join(rates)} |",
        "|---" * (1 + len(rates)) + "|",
        f"| FP | {' | '.join(map(spread, results.values()))} |",
    ]


TABLES = {
    "ladder": ladder_table,
    "buckets": buckets_table,
    "clipping": clipping_table,
    "rates": rates_table,
    "workers": workers_table,
}


def main():
    """Train, one process a seed, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--studies", nargs="+", choices=STUDIES, default=[*STUDIES][:-1]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="virtual ones")
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--quick", action="store_true", help="two steps a run, and no file is written"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.images, arguments.epochs = 2 * BATCH_SIZE, 1
    runs = {
        study: [run for run in STUDIES[study] if run.method in arguments.methods]
        for study in arguments.studies
    }
    # The same run may be in several studies.
    distinct = list(dict.fromkeys(run for each in runs.values() for run in each))
    seeds = arguments.seeds
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.setdefault(
        "TF_NUM_INTRAOP_THREADS", str(max(1, cores // len(seeds)))
    )
    where = (
        f"{arguments.workers} virtual workers" if arguments.workers > 1 else "1 worker"
    )
    conditions = compare_methods.conditions(where, threads)
    with concurrent.futures.ProcessPoolExecutor(
        len(seeds), multiprocessing.get_context("spawn")
    ) as processes:
        futures = [
            processes.submit(
                train_all,
                distinct,
                seed,
                arguments.images,
                arguments.epochs,
                arguments.workers,
            )
            for seed in seeds
        ]
        of_seeds = [future.result() for future in futures]
    source = of_seeds[0][1]
    for study, own in runs.items():
        results = {run: [found[run] for found, _ in of_seeds] for run in own}
        lines = [
            f"Data: {source}, {arguments.images} images; {arguments.epochs} epochs; "
            f"seeds {', '.join(map(str, seeds))}: mean (smallest to largest). "
            f"{conditions}.",
            "",
            *TABLES[study](results),
        ]
        print("\n".join(["", study, "", *lines]), flush=True)
        if not arguments.quick:
            compare_methods.write_table("\n".join(lines), study)


if __name__ == "__main__":
    main()
