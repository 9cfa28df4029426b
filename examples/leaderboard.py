"""Every method with five small models: accuracy, bytes, and the time of a step.

    python examples/leaderboard.py
    python examples/leaderboard.py --tables
    python examples/leaderboard.py --quick

A CNN, a table of embeddings, a ResNet, a small transformer and a decoder of characters
of the King James Bible train on four virtual workers, by each method and by float32
with the same inner optimizer, weights and batches. Writes
examples/results/leaderboard.csv row by row (an interrupted run resumes), the tables of
docs/leaderboard.md and a picture for each model beside it. `--tables` trains nothing
and writes tables and pictures from the existing rows. `--quick` uses one worker, a tiny
CNN and handwritten digits, and writes nothing.
"""

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import bible
import data
import keras
import models
import numpy as np
import tensorflow as tf
import texts
from ways import TITLES, WAYS, Way, make_optimizer

from tfgradcomp import planning
from tfgradcomp.per_example.second_moments import step_of
from tfgradcomp.planning.forecasts import no_arithmetic

sys.path.insert(0, str(Path(__file__).parent / "studies"))
import study  # noqa: E402

WORKERS = 4
# The forecasts assume the same computing time for all models.
COMPUTE_SECONDS = 0.01
LINKS = (1e8, 1e9)  # bit/s
COLUMNS = ("accuracy", "bytes")
# Learning rates of the quick form.
QUICK_RATES = {"momentum": 0.1, "SGD": 0.7, "Adam": 0.01, "LAMB": 0.05, "sign": 3e-3}
# Points behind float32 from which on the quick form fails.
MOST_BEHIND = 5.0


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        make: Returns the model.
        rates: Initial learning rates, by optimizer; they fall along a cosine.
        datasets: Function of a seed that returns batches of all workers, for training
            and testing. The training is one epoch.
    """

    make: Callable
    rates: dict[str, float]
    datasets: Callable


@functools.cache
def pictures() -> list[tuple]:
    """Return a part of Fashion-MNIST, for training and for testing, as arrays."""
    source = data.load()
    return [data.arrays(source.train, 12_800), data.arrays(source.test, 3000)]


def images(steps, each):
    """Return a function of a seed that returns batches of images."""

    def datasets(seed):
        train, test = map(tf.data.Dataset.from_tensor_slices, pictures())
        batches = data.batches(train, each * WORKERS, seed)
        return batches.take(steps), data.batches(test, 1000)

    return datasets


def synthetic(batches, steps, each, tested, at_once, *more):
    """Return a function of a seed that returns batches of texts."""

    def datasets(seed):
        batch_size = each * WORKERS
        train = batches(steps * batch_size, batch_size, 1 + seed, *more)
        return train, batches(tested, at_once, 0, *more)

    return datasets


def make_decoder():
    """Return a decoder of characters: 1.1 million parameters."""
    _, _, alphabet = bible.characters()
    return models.make_decoder(len(alphabet), bible.LENGTH)


def characters(steps, each):
    """Return a function of a seed that returns batches of texts of the Bible."""

    def datasets(seed):
        batch_size = each * WORKERS
        train = bible.batches(steps * batch_size, batch_size, seed)
        return train, bible.held_out_batches(128)

    return datasets


TASKS = {
    "CNN": Task(
        models.make_lenet,
        {"momentum": 0.05, "SGD": 0.2, "Adam": 1e-3, "LAMB": 0.03, "sign": 1e-3},
        images(200, 16),
    ),
    "embedding": Task(
        models.make_bag_of_words,
        {"momentum": 0.1, "SGD": 0.5, "Adam": 1e-2, "LAMB": 0.03, "sign": 3e-3},
        synthetic(texts.bag_batches, 250, 16, 3000, 1000),
    ),
    "ResNet": Task(
        models.make_resnet,
        {"momentum": 0.1, "SGD": 0.5, "Adam": 3e-3, "LAMB": 0.01, "sign": 1e-3},
        images(150, 8),
    ),
    "transformer": Task(
        models.make_transformer,
        {"momentum": 0.05, "SGD": 0.3, "Adam": 3e-3, "LAMB": 0.01, "sign": 1e-3},
        # Of six letters.
        synthetic(texts.letter_batches, 200, 4, 400, 200, 6),
    ),
    "decoder": Task(
        make_decoder,
        {"momentum": 0.02, "SGD": 0.1, "Adam": 2e-3, "LAMB": 0.01, "sign": 1e-3},
        characters(256, 2),
    ),
}


@functools.cache
def shapes_of(task: str, whole_tables: bool = False) -> list[tuple[int, ...]]:
    """Return the shapes that a step trains; a table of words has a batch's rows."""
    shapes = [tuple(v.shape) for v in TASKS[task].make().trainable_variables]
    if shapes[0][0] == texts.WORDS and not whole_tables:
        words, _ = next(TASKS[task].datasets(0)[0].as_numpy_iterator())
        shapes[0] = (len(np.unique(words)), shapes[0][1])
    return shapes


def forecast(way: Way, shapes, bytes_sent: float, bandwidth: float) -> float:
    """Return the seconds of a step by `planning.plan`, without methods' arithmetic.

    Args:
        way: The way.
        shapes: Of the variables.
        bytes_sent: Measured bytes of a step. The ratio of sparse messages follows from
            them.
        bandwidth: Of each link, in bit/s.
    """
    elements = sum(map(math.prod, shapes))
    made = planning.plan(
        shapes,
        COMPUTE_SECONDS,
        planning.Link(bandwidth),
        [WORKERS],
        methods=[way.planned] if way.planned else [],
        local_steps=way.local_steps,
        delay=way.delay,
        ratio=max(1.0, elements / (bytes_sent / 4 / (WORKERS - 1))),
        profile=planning.Profile(arithmetic=no_arithmetic, stock=planning.GRPC),
    )
    return made.quickest(WORKERS)[-1].step_seconds


def float32_bytes(shapes) -> float:
    """Return the bytes that a worker sends in a step of a ring all-reduce."""
    return study.ring_bytes(WORKERS, sum(map(math.prod, shapes)))


def measure(key: dict) -> dict[str, float]:
    """Return accuracy and bytes of a training."""
    task, way = TASKS[key["model"]], WAYS[key["way"]]
    accuracy, optimizer = study.train(
        study.strategy_of(WORKERS),
        key["seed"],
        task.make,
        lambda steps: make_optimizer(way, task.rates, steps),
        lambda: task.datasets(key["seed"]),
        1,
    )
    if way.planned:
        bytes_sent = optimizer.traffic.bytes_sent
    else:
        bytes_sent = float32_bytes(shapes_of(key["model"], way.whole_tables))
    return {"accuracy": accuracy, "bytes": bytes_sent}


def quick(steps: int = 96) -> list[dict]:
    """Return the rows of one worker that compresses its own gradients.

    The function that computes gradients is compiled once for all, so that few seconds
    are enough.
    """
    keras.utils.set_random_seed(0)
    source = data.digits()
    train = [*data.batches(source.train, 96, 0).repeat().take(steps)]
    images, labels = next(data.batches(source.test, 297).as_numpy_iterator())
    model = models.make_small_cnn()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before, variables = model.get_weights(), model.trainable_variables

    @tf.function(autograph=False)
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, variables), None

    @tf.function(autograph=False)
    def moments_of(x, y):
        found = step_of(model, x, y)
        return found.gradients, found.moments

    rows = []
    for name, way in WAYS.items():
        model.set_weights(before)
        common = {"transport": "all_gather"} if way.planned else {}
        optimizer = make_optimizer(way, QUICK_RATES, steps, **common)
        optimizer.build(variables)

        @tf.function(autograph=False)
        def apply(gradients, moments, optimizer=optimizer):
            more = {} if moments is None else {"second_moments": moments}
            optimizer.apply(gradients, variables, **more)

        needs_moments = getattr(optimizer, "needs_second_moments", False)
        compute = moments_of if needs_moments else gradients_of
        for x, y in train:
            apply(*compute(x, y))
        accuracy = float((model(images).numpy().argmax(-1) == labels).mean())
        rows.append({"model": "digits", "way": name, "seed": 0, "accuracy": accuracy})
    return rows


def less_float32(rows: list[dict]) -> dict[tuple[str, str], list[float]]:
    """Return the differences from float32 in points, by model, way and seed."""
    accuracies = {
        (row["model"], row["way"], row["seed"]): row["accuracy"] for row in rows
    }
    found = {}
    for (model, way, seed), accuracy in accuracies.items():
        plain = accuracies.get((model, WAYS[way].baseline, seed))
        if plain is not None:
            found.setdefault((model, way), []).append(100 * (accuracy - plain))
    return found


def behind(rows: list[dict]) -> list[str]:
    """Return a line for each way that is `MOST_BEHIND` points behind float32."""
    return [
        f"{model}, {way}: {statistics.mean(less):+.1f} points, next to float32"
        for (model, way), less in less_float32(rows).items()
        if statistics.mean(less) <= -MOST_BEHIND
    ]


def mean_of(rows: list[dict], model: str, way: str, column: str) -> float:
    """Return the mean of a column over the seeds."""
    key = model, way
    return statistics.mean(r[column] for r in rows if (r["model"], r["way"]) == key)


def table(rows: list[dict]) -> str:
    """Return the tables, one for each model, with a row for each way."""
    titles = ["method", "inner optimizer", "accuracy, %", "less float32"]
    titles += ["bytes a step", "ms a step at 100 Mbit/s", "at 1 Gbit/s"]
    parts, less = [], less_float32(rows)
    for model in dict.fromkeys(row["model"] for row in rows):
        lines = []
        for way in dict.fromkeys(row["way"] for row in rows if row["model"] == model):
            accuracy, size = (mean_of(rows, model, way, c) for c in COLUMNS)
            cells = [TITLES.get(way, f"`{way}`"), WAYS[way].title]
            cells += [f"{100 * accuracy:.2f}", points(way, less[model, way])]
            cells += [f"{size:,.0f}"]
            shapes = shapes_of(model, WAYS[way].whole_tables)
            for bandwidth in LINKS:
                seconds = forecast(WAYS[way], shapes, size, bandwidth)
                cells.append(f"{1000 * seconds:.1f}")
            lines.append(cells)
        parts += [f"### {model}", study.markdown(titles, lines, right=5)]
        parts += [f"![Points less float32, {model}]({picture(model)}.png)"]
    return "\n\n".join(parts)


def quick_table(rows: list[dict]) -> str:
    """Return the table of the quick form."""
    titles = ["method", "inner optimizer", "accuracy, %", "less float32"]
    lines, less = [], less_float32(rows)
    for row in rows:
        way = row["way"]
        cells = [TITLES.get(way, f"`{way}`"), WAYS[way].title]
        cells += [f"{100 * row['accuracy']:.2f}", points(way, less[row["model"], way])]
        lines.append(cells)
    return study.markdown(titles, lines, right=2)


def points(way: str, less: list[float]) -> str:
    """Return the mean of points and its interval over seeds; empty for float32."""
    if not WAYS[way].planned:
        return ""
    return study.interval_text(less, "+")


def draw(rows: list[dict]):
    """Draw a picture for each model: each way less float32, and the interval."""
    less = less_float32(rows)
    for model in dict.fromkeys(row["model"] for row in rows):
        made = study.figure(picture(model), 1)
        if made is None:
            return
        (axes,), save = made
        axes.figure.set_size_inches(7, 7.5)
        ways = [way for of, way in less if of == model and WAYS[way].planned]
        ordered = sorted(ways, key=lambda way: statistics.mean(less[model, way]))
        found = [study.interval(less[model, way]) for way in ordered]
        values, widths = zip(*found, strict=True)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.hlines(range(len(ordered)), 0, values, color="lightgrey", zorder=0)
        axes.errorbar(values, range(len(ordered)), xerr=widths, fmt="o", capsize=2)
        names = [TITLES.get(way, way).replace("`", "") for way in ordered]
        axes.set_yticks(range(len(ordered)), names)
        axes.set(xlabel="points less float32, same inner optimizer", title=model)
        plain = mean_of(rows, model, "SGD", "bytes")
        shares = [f"{mean_of(rows, model, w, 'bytes') / plain:.1%}" for w in ordered]
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(ordered)), shares)
        right.set_ylabel("bytes of float32's")
        save()


def picture(model: str) -> str:
    """Return the name of a model's picture in docs."""
    return f"leaderboard_{model.lower()}"


def main():
    """Train the missing rows, and write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tables", action="store_true")
    given = parser.parse_args()
    if given.quick:
        rows = quick()
        print(quick_table(rows))
        if behind(rows):
            raise SystemExit("\n".join(["too far behind:", *behind(rows)]))
        return
    keys = [
        {"model": model, "way": way, "seed": seed}
        for seed in given.seeds
        for model in given.models
        for way in WAYS
    ]
    rows = study.complete(
        "leaderboard",
        keys,
        None if given.tables else measure,
        COLUMNS,
        processes=study.one_thread_each(),
    )
    draw(rows)
    text = table(rows)
    print(text)
    study.write_page(
        "leaderboard.md", text, f"{WORKERS} virtual workers", "leaderboard"
    )


if __name__ == "__main__":
    main()
