"""Measure the accuracy of the methods that `Auto` may choose, class by class.

    python examples/studies/auto.py
    python examples/studies/auto.py --parts classes
    python examples/studies/auto.py --quick

    classes  what `Auto` chooses with each `risk`, and bfloat16 in all steps
    methods  every candidate of low and medium risk, also those that are never the
             quickest or have too large an error; and float32 at a rate larger by
             0.001 %, which shows how much chance there is

Six models train on four virtual workers: LeNet, ResNet-8 and the leaderboard's CNN, of
images, and a table of embeddings, of bags of words, with momentum; a small transformer,
of synthetic texts, and a decoder, of characters of the King James Bible, with Adam. All
methods begin after 150 steps as bfloat16, as `Auto` lets them. Writes
examples/results/auto.csv (an interrupted run resumes) and the tables of
docs/studies/auto.md; `--quick` takes few steps of some trainings and writes nothing.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import keras
import local_language
import study

import tfgradcomp
from tfgradcomp.planning.candidates import BFLOAT16, FLOAT32, Candidate, options
from tfgradcomp.planning.risks import RISKS

import data  # isort: skip
import leaderboard  # isort: skip
import models  # isort: skip
import texts  # isort: skip

WORKERS = 4
AFTER = 150
QUICK_STEPS, QUICK_AFTER = 20, 5
# No measured time enters the choice.
LINK, COMPUTE_SECONDS = "100mbit", 0.01
PAGE = "studies/auto.md"
COLUMNS, WORDS = ("accuracy", "error"), ("method", "layer")
# Points that each class may lose against float32.
MAY_LOSE = {"low": 0.3, "medium": 0.7, "high": 1.5}
# Keras' own Adam squares the rows of an embedding's gradient before it adds up equal
# ones; the wrappers add them up first. So float32 has a wrapper as well.
MOVED = "float32, moved"
PLAIN = {
    FLOAT32: Candidate(FLOAT32),
    MOVED: Candidate(FLOAT32),
    BFLOAT16: Candidate(BFLOAT16),
}
# Its error is between that of nine levels and none.
LEFT_OUT = ("QSGD(levels=17, reply='float32')",)


def momentum(rate: float, steps: int):
    """Return SGD with momentum; its rate falls to 0 along a cosine."""
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def adam(rate: float, steps: int):
    """Return Adam; its rate falls to 0 along a cosine."""
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps))


def warmed_adam(rate: float, steps: int):
    """Return Adam; its rate rises for 100 steps, then falls along a cosine."""
    return local_language.make_inner("Adam", rate, steps)


@functools.cache
def first_images(number: int) -> list:
    """Return images for training, and 10,000 for testing, cached in memory."""
    return data.first(data.load(), number)


def images(each: int, steps: int) -> Callable:
    """Return a function of a seed that returns batches of images."""

    def datasets(seed):
        train, test = first_images(each * WORKERS * steps)
        return data.batches(train, each * WORKERS, seed), data.batches(test, 1000)

    return datasets


def letters(each: int, steps: int) -> Callable:
    """Return a function of a seed that returns batches of texts of four letters.

    With six, 400 steps end while accuracy still jumps, at 54 to 74 %.
    """

    def datasets(seed):
        train = texts.letter_batches(
            each * WORKERS * steps, each * WORKERS, 1 + seed, 4
        )
        return train, texts.letter_batches(2000, 500, 0, 4)

    return datasets


class Task(NamedTuple):
    """A model, its optimizer and its data.

    Attributes:
        make: Returns the model.
        inner: Function of the rate and the number of steps: the inner optimizer.
        rate: The learning rate.
        datasets: Function of a seed that returns batches of all workers, for training
            and testing. The training is one epoch.
    """

    make: Callable
    inner: Callable
    rate: float
    datasets: Callable


TASKS = {
    "LeNet": Task(models.make_lenet, momentum, 0.05, images(32, 300)),
    "ResNet-8": Task(models.make_resnet, momentum, 0.1, images(16, 300)),
    "transformer": Task(models.make_transformer, adam, 3e-3, letters(8, 400)),
    "CNN": Task(models.make_lenet, momentum, 0.05, leaderboard.TASKS["CNN"].datasets),
    "embedding": Task(
        models.make_bag_of_words,
        momentum,
        0.1,
        leaderboard.TASKS["embedding"].datasets,
    ),
    "decoder": Task(
        leaderboard.make_decoder, warmed_adam, 2e-3, leaderboard.characters(768, 2)
    ),
}
# With these, every candidate is trained.
WITH_METHODS = ("LeNet", "ResNet-8", "transformer")


class Chosen(tfgradcomp.Auto):
    """`Auto` whose choice is a given candidate, whatever its errors and its speed."""

    def __init__(self, inner_optimizer, chosen: str, **arguments):
        super().__init__(inner_optimizer, risk="high", **arguments)
        self._chosen = chosen

    def _take(self, decision):
        made = candidates(self.inner_optimizer)[self._chosen].candidate
        super()._take(dataclasses.replace(decision, candidate=made))


def candidates(inner) -> dict:
    """Return the options of low and medium risk for an optimizer, by their names."""
    return {
        option.name: option
        for option in options(inner)
        if option.risk in ("low", "medium") and not option.reason
    }


def make_optimizer(way: str, inner, after: int):
    """Return the optimizer of a way: float32, bfloat16, a class or a candidate."""
    common = {"link": LINK, "compute": COMPUTE_SECONDS, "after": after}
    if way in PLAIN:
        return PLAIN[way].wrap(inner)
    if way in MAY_LOSE:
        return tfgradcomp.Auto(inner, risk=way, **common)
    return Chosen(inner, way, **common)


def keys_of_classes(seeds: list[int]) -> list[dict]:
    """Return the keys of float32, bfloat16 and the classes, a seed's together."""
    return [
        {"task": task, "way": way, "seed": seed}
        for seed in seeds
        for task in TASKS
        for way in (FLOAT32, BFLOAT16, *MAY_LOSE)
    ]


def keys_of_methods(seeds: list[int], rows: list[dict]) -> list[dict]:
    """Return the keys of candidates that no class has chosen, and of moved float32.

    Args:
        seeds: The seeds.
        rows: The rows of the classes.
    """
    chosen = {(row["task"], row["method"], row["seed"]) for row in rows}
    ways = {
        task: [*candidates(made.inner(made.rate, 1)), MOVED]
        for task, made in TASKS.items()
    }
    return [
        {"task": task, "way": way, "seed": seed}
        for seed in seeds
        for task, names in ways.items()
        for way in names
        if (task, way, seed) not in chosen and way not in LEFT_OUT
    ]


def train(key: dict, is_quick: bool = False) -> dict:
    """Return the accuracy in percent, the choice, and the error of its worst layer."""
    task = TASKS[key["task"]]

    def make_datasets():
        batches, test = task.datasets(key["seed"])
        return (batches.take(QUICK_STEPS) if is_quick else batches), test

    def make(steps):
        after = QUICK_AFTER if is_quick else AFTER
        rate = task.rate * (1 + 1e-5 * (key["way"] == MOVED))
        return make_optimizer(key["way"], task.inner(rate, steps), after)

    accuracy, optimizer = study.train(
        study.strategy_of(WORKERS), key["seed"], task.make, make, make_datasets, 1
    )
    found = {"accuracy": 100 * accuracy, "error": float("nan")}
    decision = getattr(optimizer, "decision", None)
    if decision is None:
        return found | {"method": key["way"], "layer": ""}
    row = decision.row
    error = float("nan") if row.error is None else row.error
    return found | {"error": error, "method": row.name, "layer": row.layer}


def table(rows: list[dict], of_classes: bool) -> str:
    """Return a table of classes, or of all methods that were trained.

    Args:
        rows: The rows of both parts.
        of_classes: Whether it has a line for each class, not for each method.
    """
    titles = ["model", "risk", "method", "error", "accuracy, %", "less float32"]
    groups: dict[tuple, dict] = {}
    # The same method with the same seed gives the same bits in both parts.
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups.setdefault((row["task"], row["method"]), {})[row["seed"]] = row
    bases = groups
    if of_classes:
        groups = {}
        for row in sorted(rows, key=lambda row: row["seed"]):
            if row["way"] in MAY_LOSE:
                groups.setdefault((row["task"], row["way"]), {})[row["seed"]] = row
    lines = []
    # Models in their order, each from its safest method on.
    found = [
        (task, name if of_classes else risk_of(task, name), name)
        for task, name in groups
    ]
    found.sort(key=lambda one: ([*TASKS].index(one[0]), RISKS.index(one[1])))
    for task, risk, name in found:
        own = groups[task, name]
        methods = dict.fromkeys(row["method"] for row in own.values())
        errors = [f"{row['error']:.2f}" for row in own.values() if row["error"] >= 0]
        less, less_half = (
            study.less(own, bases.get((task, base), {})) if name != base else []
            for base in (FLOAT32, BFLOAT16)
        )
        lines.append(
            [
                task,
                risk,
                ", ".join(f"`{method}`" for method in methods),
                ", ".join(errors),
                f"{statistics.mean(row['accuracy'] for row in own.values()):.2f}",
                study.interval_text(less, "+") if less else "",
                ", ".join(f"{one:+.2f}" for one in less),
                ", ".join(f"{one:+.2f}" for one in less_half),
                verdict(risk, less),
            ]
        )
    titles += ["by seeds", "less bfloat16, by seeds", "holds"]
    return study.markdown(titles, lines)


def risk_of(task: str, name: str) -> str:
    """Return the class of a method."""
    made = TASKS[task]
    risks = {o.name: o.risk for o in options(made.inner(made.rate, 1), AFTER)}
    return risks.get(name, "none")


def verdict(risk: str, less: list[float]) -> str:
    """Return whether the mean is in the class; empty if there is none to compare."""
    if risk not in MAY_LOSE or not less:
        return ""
    return "yes" if statistics.mean(less) >= -MAY_LOSE[risk] else "no"


def quick():
    """Take a few steps by a class and by a candidate."""
    ways = FLOAT32, "low", "TernGrad"
    keys = [{"task": "LeNet", "way": way, "seed": 0} for way in ways]
    rows = [key | train(key, is_quick=True) for key in keys]
    print(table(rows, True), "", table(rows, False), sep="\n")


def main():
    """Run the study."""
    parser = study.arguments(__doc__, range(6), ("classes", "methods"))
    parser.add_argument("--models", nargs="+", choices=TASKS, default=[*TASKS])
    given = parser.parse_args()
    if given.quick:
        quick()
        return

    def rows_of(part, keys, tasks):
        is_wanted = part in given.parts and not given.tables
        tasks = [task for task in tasks if is_wanted and task in given.models]
        wanted = [key for key in keys if key["task"] in tasks]
        complete = functools.partial(
            study.complete, "auto", columns=COLUMNS, words=WORDS
        )
        if wanted:
            complete(wanted, train)
        return complete(keys, None)

    rows = rows_of("classes", keys_of_classes(given.seeds), TASKS)
    rows += rows_of("methods", keys_of_methods(given.seeds, rows), WITH_METHODS)
    where = f"{WORKERS} virtual workers, seeds {', '.join(map(str, given.seeds))}"
    for name, of_classes in (("classes", True), ("methods", False)):
        if name in given.parts:
            text = table(rows, of_classes)
            print("", name, "", text, sep="\n", flush=True)
            study.write_page(PAGE, text, where, name)


if __name__ == "__main__":
    main()
