"""Train a small ResNet with quantizers, as in the ORQ paper's tables.

    python examples/studies/quantizers.py
    python examples/studies/quantizers.py --parts ladder workers
    python examples/studies/quantizers.py --quick

A ResNet learns Fashion-MNIST, and its gradients are quantized as Xu, Huo and Huang do,
Optimal Gradient Quantization Condition for Communication-Efficient Distributed
Training, 2019:

    ladder     all methods, one worker (their Table 2)
    workers    four virtual workers, which share the batch; ORQ clipped (their Table 5)
    blocks     sizes of blocks, one worker (their Table 3)
    clipping   gradients clipped to c deviations, the rate warming up (their Table 4)
    rates      the learning rate of full precision, which all methods take

Writes examples/results/quantizers.csv, the tables of docs/studies/quantizers.md and its
figure; an interrupted run resumes. `--quick` takes two steps of two methods and writes
nothing.
"""

import functools
import statistics
from typing import NamedTuple

import keras
import study

import tfgradcomp

import data  # isort: skip
import models  # isort: skip

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
    # Clipped to 2.5 deviations, as in its paper; not in Table 2.
    "TernGrad": ("TernGrad", {}, None),
}
PAPER_LADDER = {method: paper for method, (*_, paper) in METHODS.items() if paper}
BLOCK_SIZES = (128, 512, 2048, 8192, 32768)
# Table 3: ResNet-110, CIFAR-10.
PAPER_BLOCKS = {
    "QSGD-3": (90.86, 90.23, 89.37, 87.87, 85.63),
    "ORQ-3": (91.66, 90.92, 90.18, 88.86, 87.08),
}
CLIP_FACTORS = (None, 1.7, 2.5)
# Table 4: losses of c = 1.7 and c = 2.5 against full precision, ResNet-110,
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
PAPERS = {"ladder": PAPER_LADDER, "workers": PAPER_WORKERS}
# Methods that are compared with each other.
PAIRS = {
    "ladder": [
        ("ORQ-3", "QSGD-3"),
        ("ORQ-5", "QSGD-5"),
        ("ORQ-5", "Linear-5"),
        ("ORQ-9", "QSGD-9"),
        ("ORQ-9", "Linear-9"),
    ],
    "workers": [("ORQ-3", "TernGrad"), ("ORQ-5", "QSGD-5"), ("ORQ-9", "QSGD-9")],
}
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
COLUMNS = ("accuracy", "bits")


class Run(NamedTuple):
    """A training's settings, except the number of workers, the data and the seed."""

    method: str
    block_size: int = 2048
    clip_factor: float | None = None
    warms_up: bool = False
    rate: float = LEARNING_RATE


class Part(NamedTuple):
    """A part of the study: its trainings and their length."""

    runs: list[Run]
    images: int = 12_800
    epochs: int = 4
    workers: int = 1
    seeds: int = 3


LONG = {"images": 60_000, "epochs": 5, "seeds": 5}
PARTS = {
    "ladder": Part([Run(method) for method in PAPER_LADDER], **LONG),
    "workers": Part(
        [
            Run(method, 512, 1.7 if method.startswith("ORQ") else None)
            for method in PAPER_WORKERS
        ],
        **LONG,
        workers=4,
    ),
    "blocks": Part([Run(m, size) for m in PAPER_BLOCKS for size in BLOCK_SIZES]),
    "clipping": Part(
        [
            Run("FP", warms_up=True),
            *(
                Run(method, clip_factor=c, warms_up=True)
                for method in PAPER_CLIPPING
                for c in CLIP_FACTORS
            ),
        ]
    ),
    "rates": Part([Run("FP", rate=rate) for rate in RATES]),
}


def make_optimizer(run: Run, steps: int, seed: int):
    """Return SGD with momentum, its rate falling to 0, wrapped by the method."""
    warm_up = int(WARM_UP * steps) if run.warms_up else 0
    schedule = keras.optimizers.schedules.CosineDecay(
        run.rate / 10 if warm_up else run.rate,
        steps - warm_up,
        warmup_target=run.rate if warm_up else None,
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
        # "auto" would notice that one worker needs no compression.
        transport="all_gather",
        # As in the paper, where small variables are quantized like all others.
        min_size=0,
        seed=seed,
        # The accuracy of a diverging run is a result as well.
        nonfinite="skip",
        **arguments,
    )


def keys_of(part: Part, seeds: range | list[int]) -> list[dict]:
    """Return the keys of the rows of a part, those of a seed together."""
    setting = part._asdict()
    shared = {name: setting[name] for name in ("workers", "images", "epochs")}
    return [shared | run._asdict() | {"seed": s} for s in seeds for run in part.runs]


@functools.cache
def datasets(images: int):
    """Return the first images for training, and as many of 10,000 for testing."""
    return data.first(data.load(), images)


def train(key: dict) -> dict:
    """Train a new model; the seed decides weights, order and rounding.

    Returns:
        Test accuracy in percent, and bits an element that a worker sends.
    """
    run = Run(**{name: key[name] for name in Run._fields})

    def make_datasets():
        train_set, test_set = datasets(key["images"])
        batches = data.batches(train_set, BATCH_SIZE, key["seed"])
        return batches, data.batches(test_set, 1000)

    accuracy, optimizer = study.train(
        study.strategy_of(key["workers"]),
        key["seed"],
        models.make_resnet,
        lambda steps: make_optimizer(run, steps, key["seed"]),
        make_datasets,
        key["epochs"],
    )
    bits = 32.0
    if hasattr(optimizer, "traffic"):
        bits = optimizer.traffic.bits_per_element_up
    return {"accuracy": 100 * accuracy, "bits": bits}


class Results:
    """Rows of a part, by runs and seeds."""

    def __init__(self, rows: list[dict]):
        self._rows = {}
        for row in rows:
            run = Run(**{name: row[name] for name in Run._fields})
            self._rows.setdefault(run, {})[row["seed"]] = row

    def __len__(self):
        return len(self._rows)

    def __iter__(self):
        return iter(self._rows)

    def __contains__(self, run: Run) -> bool:
        return run in self._rows

    def accuracies(self, run: Run) -> list[float]:
        """Return the accuracies of all seeds."""
        return [row["accuracy"] for row in self._rows[run].values()]

    def bits(self, run: Run) -> float:
        """Return the mean number of bits an element."""
        return statistics.mean(row["bits"] for row in self._rows[run].values())

    def text(self, run: Run) -> str:
        """Return the mean accuracy, and the smallest and largest of the seeds."""
        found = self.accuracies(run)
        return f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    def less(self, run: Run, other: Run) -> list[float]:
        """Return the differences between two runs, seed by seed.

        Equal seeds have equal initial weights and batches.
        """
        return study.less(self._rows[run], self._rows.get(other, {}))

    def less_text(self, run: Run, other: Run) -> str:
        """Return the mean of `less` with its 95 % interval by Student's t."""
        found = self.less(run, other)
        return study.interval_text(found, "+") if found else ""


def plain_of(part: str) -> Run:
    """Return the full-precision run of a part."""
    return next(run for run in PARTS[part].runs if run.method == "FP")


def ladder_table(results: Results, part: str = "ladder") -> str:
    """Return the table of a part with a row for each method, and the paper's."""
    titles = ["method", "bits an element", "test accuracy, %", "less FP"]
    papers, plain, lines = PAPERS[part], plain_of(part), []
    for run in results:
        less = results.less_text(run, plain) if run != plain else ""
        paper = f"{papers[run.method] - papers['FP']:+.2f}" if run != plain else ""
        bits = f"{results.bits(run):.2f}"
        lines.append([run.method, bits, results.text(run), less, paper])
    return study.markdown([*titles, "paper, less FP"], lines)


def pairs_table(results: Results, part: str) -> str:
    """Return differences of methods with as many levels, and the paper's."""
    papers, lines = PAPERS[part], []
    runs = {run.method: run for run in results}
    for one, other in PAIRS[part]:
        if one in runs and other in runs:
            less = results.less_text(runs[one], runs[other])
            paper = f"{papers[one] - papers[other]:+.2f}"
            lines.append([f"{one}, less {other}", less, paper])
    return study.markdown(["difference", "here", "paper"], lines)


def blocks_table(results: Results) -> str:
    """Return the table of sizes of blocks."""
    lines = []
    for method, paper in PAPER_BLOCKS.items():
        runs = [Run(method, size) for size in BLOCK_SIZES]
        if all(run in results for run in runs):
            lines.append([method, *map(results.text, runs)])
            lines.append(["paper's", *(f"{value:.2f}" for value in paper)])
    return study.markdown(["method", *map(str, BLOCK_SIZES)], lines)


def clipping_table(results: Results) -> str:
    """Return the table of factors of clipping."""
    plain, lines = plain_of("clipping"), []
    if plain in results:
        lines.append(["FP", results.text(plain), "", ""])
    for method, paper in PAPER_CLIPPING.items():
        runs = [Run(method, clip_factor=c, warms_up=True) for c in CLIP_FACTORS]
        if all(run in results for run in runs):
            lines.append([method, *map(results.text, runs)])
            lines.append(["less FP", *(results.less_text(run, plain) for run in runs)])
            lines.append(["paper, less FP", "", *(f"{loss:+.2f}" for loss in paper)])
    titles = ["not clipped", *(f"c = {c}" for c in CLIP_FACTORS[1:])]
    return study.markdown(["method", *titles], lines)


def rates_table(results: Results) -> str:
    """Return the table of learning rates."""
    rates = [f"{run.rate:g}" for run in results]
    cells = ["FP", *map(results.text, results)]
    return study.markdown(["learning rate", *rates], [cells])


TABLES = {
    "ladder": ladder_table,
    "workers": functools.partial(ladder_table, part="workers"),
    "blocks": blocks_table,
    "clipping": clipping_table,
    "rates": rates_table,
}


def draw(of_parts: dict[str, Results]):
    """Draw the methods' losses against full precision, by their bits."""
    titles = {"ladder": "one worker", "workers": "four workers"}
    titles = {part: title for part, title in titles.items() if of_parts[part]}
    made = study.figure("studies/quantizers", len(titles), sharex=True)
    if made is None:
        return
    axes, save = made
    for axis, (part, title) in zip(axes, titles.items(), strict=True):
        results, plain = of_parts[part], plain_of(part)
        runs = sorted((run for run in results if run != plain), key=results.bits)
        found = {
            f"{run.method}, {results.bits(run):.2f}": results.less(run, plain)
            for run in runs
        }
        label = "accuracy less full precision's, points"
        study.draw_intervals(axis, found, title, label)
    axes[0].set_ylabel("method, bits an element")
    save()


def report(name: str, results: Results, seeds: list[int]):
    """Write the tables of a part."""
    part, page = PARTS[name], "studies/quantizers.md"
    workers = "1 worker" if part.workers == 1 else f"{part.workers} virtual workers"
    where = f"{workers}, {part.images:,} images, {part.epochs} epochs, "
    where += f"seeds {', '.join(map(str, seeds))}: mean (smallest to largest)"
    tables = {name: TABLES[name](results)}
    if name in PAIRS:
        tables[f"{name} pairs"] = pairs_table(results, name)
    for marker, table in tables.items():
        print("", marker, "", table, sep="\n", flush=True)
        study.write_page(page, table, where if marker == name else None, marker)


def quick():
    """Train two methods for two steps, on one worker."""
    part = Part([Run("FP"), Run("ORQ-3")], images=2 * BATCH_SIZE, epochs=1)
    rows = [key | train(key) for key in keys_of(part, [0])]
    print(ladder_table(Results(rows)))


def main():
    """Run the study."""
    given = study.arguments(__doc__, None, PARTS).parse_args()
    if given.quick:
        quick()
        return
    processes, of_parts = study.one_thread_each(), {}
    for name, part in PARTS.items():
        seeds = given.seeds or list(range(part.seeds))
        measure = None if given.tables or name not in given.parts else train
        keys = keys_of(part, seeds)
        rows = study.complete("quantizers", keys, measure, COLUMNS, processes=processes)
        of_parts[name] = Results(rows)
        if rows and name in given.parts:
            report(name, of_parts[name], seeds)
    draw(of_parts)


if __name__ == "__main__":
    main()
