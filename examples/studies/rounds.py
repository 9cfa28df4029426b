"""Measure the accuracy of local steps, 1-bit Adam and uncompressed steps.

    python examples/studies/rounds.py
    python examples/studies/rounds.py --parts local_steps
    python examples/studies/rounds.py --quick

    local_steps         an exchange after 4, 16 and 64 steps: LeNet and ResNet-8
    adam                1-bit Adam, 0/1 Adam and Adam: LeNet, and a small transformer
    uncompressed_steps  methods with a warm-up in float32, or one step in ten: LeNet

Networks of images learn Fashion-MNIST, the transformer the next letter of a synthetic
text, on four virtual workers. Writes examples/results/rounds.csv (an interrupted run
resumes), a table in docs/local-steps.md, docs/onebit-adam.md and docs/float-steps.md,
and a figure for the first; `--quick` takes few steps of some trainings and writes
nothing.
"""

import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import keras
import study

import tfgradcomp

import data  # isort: skip
import models  # isort: skip
import texts  # isort: skip

WORKERS = 4
QUICK_STEPS = 20
COLUMNS = ("accuracy", "bytes")


def adam(rate: float, steps: int):
    """Return Adam; its rate falls to 0 along a cosine."""
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps))


def local_steps(every: int, make_outer: Callable) -> Callable:
    """Return `LocalSteps` around Adam, with an exchange after `every` steps."""
    return lambda rate, steps: tfgradcomp.LocalSteps(
        adam(rate, steps), make_outer(), every=every
    )


def one_bit():
    """Return error feedback by blocks, as the outer optimizer of `LocalSteps`."""
    sgd = keras.optimizers.SGD(1.0)
    return tfgradcomp.DistEFBlockSGD(sgd, transport="sharded")


def one_bit_momentum():
    """Return the same with momentum and a smaller rate."""
    sgd = keras.optimizers.SGD(0.7)
    return tfgradcomp.DistEFBlockSGDM(sgd, transport="sharded")


def float16_momentum():
    """Return the same momentum with nearly no compression."""
    sgd = keras.optimizers.SGD(0.7, 0.9, nesterov=True)
    return tfgradcomp.HalfPrecision(sgd, transport="sharded")


def terngrad(rate: float, steps: int, **floats):
    """Return TernGrad around SGD with momentum."""
    return tfgradcomp.TernGrad(keras.optimizers.SGD(0.05, momentum=0.9), **floats)


def dist_ef(rate: float, steps: int, **floats):
    """Return error feedback by blocks, with its own momentum."""
    return tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.02), **floats)


def strom(rate: float, steps: int, **floats):
    """Return Strom's method around SGD with momentum."""
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    return tfgradcomp.Strom(sgd, threshold="auto", **floats)


class Task(NamedTuple):
    """A model and Adam's settings for it.

    Attributes:
        make: Returns the model.
        rate: Adam's learning rate.
        epochs: Number of epochs that Adam needs.
    """

    make: Callable
    rate: float
    epochs: int


TASKS = {
    "LeNet": Task(models.make_lenet, 1e-3, 3),
    "ResNet-8": Task(models.make_resnet, 1e-3, 3),
    "transformer": Task(models.make_transformer, 3e-3, 10),
}


class Group(NamedTuple):
    """Ways to be compared with the first way.

    Attributes:
        task: Name of the task.
        ways: Functions of Adam's rate and the number of all steps that return an
            optimizer.
    """

    task: str
    ways: dict[str, Callable]


class Part(NamedTuple):
    """A part of the study.

    Attributes:
        page: Page in docs that has its table.
        titles: Titles of groups and ways.
        groups: The groups.
        seeds: Default number of seeds.
    """

    page: str
    titles: tuple[str, str]
    groups: dict[str, Group]
    seeds: int = 5


LOCAL_STEPS = {
    "float32, each step": adam,
    "4 steps, 1 bit": local_steps(4, one_bit),
    "16 steps, 1 bit": local_steps(16, one_bit),
    "64 steps, 1 bit": local_steps(64, one_bit),
    "4 steps, 1 bit, momentum": local_steps(4, one_bit_momentum),
    "16 steps, 1 bit, momentum": local_steps(16, one_bit_momentum),
    "64 steps, 1 bit, momentum": local_steps(64, one_bit_momentum),
    "4 steps, float16, momentum": local_steps(4, float16_momentum),
    "16 steps, float16, momentum": local_steps(16, float16_momentum),
}
ADAM = {
    "Adam": adam,
    "OneBitAdam": lambda rate, steps: tfgradcomp.OneBitAdam(
        adam(rate, steps), steps // 5
    ),
    "OneBitAdam, refresh=16": lambda rate, steps: tfgradcomp.OneBitAdam(
        adam(rate, steps), steps // 5, refresh=16
    ),
    # Rounds of 1, 2, 4 and 8 steps, each for an eighth of the training, then of 16.
    "ZeroOneAdam": lambda rate, steps: tfgradcomp.ZeroOneAdam(
        adam(rate, steps), steps // 5, double_every=steps // 8
    ),
}
FLOAT_STEPS = {
    "alone": {},
    "warmup_steps=50": {"warmup_steps": 50},
    "dense_every=10": {"dense_every": 10},
}
METHODS = {"TernGrad": terngrad, "DistEFBlockSGDM": dist_ef, "Strom": strom}
PARTS = {
    "local_steps": Part(
        "local-steps.md",
        ("model", "exchange"),
        {
            "LeNet": Group("LeNet", LOCAL_STEPS),
            "ResNet-8": Group(
                "ResNet-8",
                {k: way for k, way in LOCAL_STEPS.items() if not k.startswith("4 ")},
            ),
        },
        seeds=3,
    ),
    "adam": Part(
        "onebit-adam.md",
        ("model", "optimizer"),
        {task: Group(task, ADAM) for task in ("LeNet", "transformer")},
    ),
    "uncompressed_steps": Part(
        "float-steps.md",
        ("method", "steps as float32"),
        {
            name: Group(
                "LeNet",
                {
                    way: functools.partial(method, **floats)
                    for way, floats in FLOAT_STEPS.items()
                },
            )
            for name, method in METHODS.items()
        },
    ),
}


def keys_of(name: str, seeds: list[int]) -> list[dict]:
    """Return the keys of the rows of a part, those of a seed together."""
    return [
        {"part": name, "group": group, "way": way, "seed": seed}
        for seed in seeds
        for group, (_, ways) in PARTS[name].groups.items()
        for way in ways
    ]


@functools.cache
def images() -> list:
    """Return all images for training and testing, cached in memory."""
    return data.first(data.load(), 60_000)


def datasets(task: str, seed: int) -> tuple:
    """Return batches of all workers, for training and testing."""
    if task == "transformer":
        train = texts.letter_batches(20_000, 32 * WORKERS, 1 + seed)
        return train, texts.letter_batches(2_000, 500, 0)
    train, test = images()
    return data.batches(train, 64 * WORKERS, seed), data.batches(test, 1000)


def train(key: dict, is_quick: bool = False) -> dict:
    """Return the accuracy in percent, and received bytes relative to float32's.

    Float32 uses a ring. Uncompressed steps of compressing methods do not count.
    """
    group = PARTS[key["part"]].groups[key["group"]]
    task = TASKS[group.task]

    def make_datasets():
        batches, test = datasets(group.task, key["seed"])
        return (batches.take(QUICK_STEPS) if is_quick else batches), test

    accuracy, optimizer = study.train(
        study.strategy_of(WORKERS),
        key["seed"],
        task.make,
        lambda steps: group.ways[key["way"]](task.rate, steps),
        make_datasets,
        1 if is_quick else task.epochs,
    )
    part = 1.0
    if hasattr(optimizer, "traffic"):
        traffic = optimizer.traffic
        elements = traffic.elements_compressed + traffic.elements_plain
        part = traffic.bytes_received / study.ring_bytes(WORKERS, elements)
    return {"accuracy": 100 * accuracy, "bytes": part}


class Rows:
    """The rows of a part, by groups and ways."""

    def __init__(self, name: str, rows: list[dict]):
        self.part = PARTS[name]
        self._rows = {}
        for row in rows:
            ways = self._rows.setdefault(row["group"], {})
            ways.setdefault(row["way"], {})[row["seed"]] = row

    def less(self, group: str, way: str) -> list[float]:
        """Return a way's differences from the first of its group, seed by seed."""
        ways = self._rows[group]
        return study.less(ways[way], next(iter(ways.values())))

    def table(self) -> str:
        """Return the table, a row for each group and way."""
        titles = [*self.part.titles, "accuracy, %", "less the first", "by seeds"]
        lines = []
        for group, ways in self._rows.items():
            for number, (way, rows) in enumerate(ways.items()):
                found = [row["accuracy"] for row in rows.values()]
                less = self.less(group, way) if number else []
                cells = [group, way, f"{statistics.mean(found):.2f}"]
                cells.append(study.interval_text(less, "+") if number else "")
                cells.append(", ".join(f"{one:+.2f}" for one in less))
                part = statistics.mean(row["bytes"] for row in rows.values())
                cells.append(f"{100 * part:.2g} %" if number or part < 1 else "")
                lines.append(cells)
        return study.markdown([*titles, "bytes"], lines, right=1)

    def draw(self):
        """Draw the losses of all ways except the first, group by group."""
        made = study.figure("local-steps", len(self._rows), sharex=True)
        if made is None:
            return
        axes, save = made
        for axis, (group, ways) in zip(axes, self._rows.items(), strict=True):
            found = {way: self.less(group, way) for way in [*ways][:0:-1]}
            label = "accuracy less float32's, points"
            study.draw_intervals(axis, found, group, label)
        save()


def quick():
    """Take a few steps with the last way of each part."""
    for name in PARTS:
        keys = keys_of(name, [0])
        row = keys[-1] | train(keys[-1], is_quick=True)
        print("", name, "", Rows(name, [row]).table(), sep="\n", flush=True)


def main():
    """Run the study."""
    given = study.arguments(__doc__, None, PARTS).parse_args()
    if given.quick:
        quick()
        return
    processes = study.one_thread_each()
    for name in given.parts:
        measure = None if given.tables else train
        seeds = given.seeds or list(range(PARTS[name].seeds))
        keys = keys_of(name, seeds)
        rows = Rows(name, study.complete("rounds", keys, measure, COLUMNS, processes))
        text = rows.table()
        print("", name, "", text, sep="\n", flush=True)
        where = f"{WORKERS} virtual workers, seeds {', '.join(map(str, seeds))}"
        study.write_page(rows.part.page, text, where)
        if name == "local_steps":
            rows.draw()


if __name__ == "__main__":
    main()
