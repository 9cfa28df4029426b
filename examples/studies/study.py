"""Training on virtual workers, rows and tables, shared by the studies."""

import argparse
import concurrent.futures
import csv
import functools
import math
import multiprocessing
import os
import statistics
import sys
from pathlib import Path

import keras
import tensorflow as tf

import tfgradcomp

ROOT = Path(__file__).resolve().parents[2]
# Columns of each row of `complete`.
WHERE = ("commit", "processor")
sys.path.insert(0, str(ROOT / "examples"))

from compare_methods import conditions, git, processor, replace_table  # noqa: E402


def arguments(doc, seeds=(0, 1, 2), parts=()):
    """Return a parser of the arguments that all studies take.

    Args:
        doc: The script's docstring.
        seeds: The default seeds; None: the study's parts have their own.
        parts: Names of parts that can be run alone.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds and [*seeds])
    parser.add_argument("--quick", action="store_true")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts])
        help_text = "train nothing: of the rows there are"
        parser.add_argument("--tables", action="store_true", help=help_text)
    return parser


def ring_bytes(workers, elements):
    """Return the bytes that a worker sends in a ring all-reduce of float32 numbers."""
    return 2 * (workers - 1) / workers * 4 * elements


def less(own, plain):
    """Return the differences in accuracy from other rows, seed by seed.

    Args:
        own: Rows by seeds.
        plain: Rows to compare with, by seeds.
    """
    return [own[s]["accuracy"] - plain[s]["accuracy"] for s in plain if s in own]


def markdown(titles, rows, right=0):
    """Return a table of rows of texts, with its last columns aligned to the right."""
    rule = "|---" * (len(titles) - right) + "|--:" * right + "|"
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


@functools.cache
def strategy_of(workers):
    """Return a strategy of virtual workers, or no strategy for one worker."""
    if workers == 1:
        return tf.distribute.get_strategy()
    tfgradcomp.enable_multi_worker_fit()
    return tfgradcomp.virtual_workers(workers)


def train(strategy, seed, make_model, make_optimizer, make_datasets, epochs):
    """Return accuracy on the second dataset after training on the first; the optimizer.

    The same seed gives every optimizer the same initial weights and batches.

    Args:
        strategy: Of the workers.
        seed: The seed.
        make_model: Returns the model.
        make_optimizer: Function of the number of all steps that returns the optimizer.
        make_datasets: Returns batches for training, and for testing.
        epochs: Number of epochs.
    """
    # The global seed also determines the order of batches.
    keras.utils.set_random_seed(seed)
    batches, test = make_datasets()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = make_model()
        model.compile(
            make_optimizer(epochs * len(batches)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(batches, epochs=epochs, verbose=0, shuffle=False)
    _, accuracy = model.evaluate(test, verbose=0)
    keras.backend.clear_session()
    return accuracy, model.optimizer


def write_page(page, text, where, name="accuracy", rows=()):
    """Write a table between the markers of a page in docs.

    Args:
        page: The page, in docs.
        text: The table.
        where: Beginning of the line above the table that states its conditions; None:
            no line.
        name: Name of the markers.
        rows: Of `complete`, which name the processors; none: this machine's.
    """
    page = ROOT / "docs" / page
    if where is not None:
        threads = os.environ.get("TF_NUM_INTRAOP_THREADS", str(os.cpu_count()))
        processors = tuple(dict.fromkeys(row["processor"] for row in rows))
        text = f"{conditions(where, threads, processors)}.\n\n{text}"
    page.write_text(replace_table(page.read_text(), text, name))


def trainings(rows):
    """Return how many trainings rows are, and when and at which commits they were made.

    Args:
        rows: Of `complete`, with dates.
    """
    dates = sorted({row["date"] for row in rows}) or ["never"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return (
        f"{len(rows)} trainings, measured from {dates[0]} to {dates[-1]}, at commits "
        f"{commits}"
    )


def one_thread_each():
    """Return the number of cores; limit processes started later to one thread."""
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    return len(os.sched_getaffinity(0))


def measured(measure, keys, processes=1):
    """Yield keys with their measurements, in the order in which these end.

    Args:
        measure: Function of a key.
        keys: The keys.
        processes: Number of processes; 1: measure in this process. For more, `measure`
            is a function of a module.
    """
    if processes == 1:
        yield from ((key, measure(key)) for key in keys)
        return
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, spawned) as executor:
        futures = {executor.submit(measure, key): key for key in keys}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        finally:
            executor.shutdown(cancel_futures=True)


def complete(name, keys, measure, columns, processes=1, words=(), most=None):
    """Return a row for each key, in order; measure and save those that are missing.

    An interrupted study resumes: each row is appended at once to
    examples/results/NAME.csv, with its commit and the processor that measured it.

    Args:
        name: Name of the file.
        keys: Dicts of the columns that identify rows.
        measure: Function of a key that returns a dict of the other columns; None: all
            rows exist.
        columns: Names of the measured columns, which are numbers.
        processes: Number of processes that measure, as of `measured`.
        words: Names of the measured columns that are texts.
        most: The most rows to measure; None: all.
    """
    path = ROOT / "examples" / "results" / f"{name}.csv"
    found = {}
    if path.exists():
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                key = tuple(row[column] for column in keys[0])
                found[key] = {column: float(row[column]) for column in columns} | {
                    # Files of before this column do not say which processor it was.
                    column: row.get(column, "unknown")
                    for column in (*words, *WHERE)
                }

    def texts(key):
        return tuple(map(str, key.values()))

    missing = {texts(key): key for key in keys if texts(key) not in found}
    wanted = [*missing.values()][:most] if measure else ()
    for key, values in measured(measure, wanted, processes):
        commit = git("rev-parse", "--short", "HEAD")
        found[texts(key)] = values | {"commit": commit, "processor": processor()}
        print(*texts(key), found[texts(key)], flush=True)
        known = [
            dict(zip(key, own, strict=True)) | values for own, values in found.items()
        ]
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*key, *columns, *words, *WHERE])
            writer.writeheader()
            writer.writerows(known)
    return [key | found[texts(key)] for key in keys if texts(key) in found]


def interval(values):
    """Return the mean, and half the width of its 95 % interval by Student's t."""
    mean, number = statistics.mean(values), len(values)
    if number < 2:
        return mean, float("nan")
    # The 97.5 % quantiles of one to nine degrees of freedom.
    quantiles = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
    width = quantiles[min(number, 10) - 2] * statistics.stdev(values) / number**0.5
    return mean, width


def interval_text(values, sign=""):
    """Return the mean as text, and half of its interval for several values."""
    mean, width = interval(values)
    return f"{mean:{sign}.2f}" + ("" if math.isnan(width) else f" ± {width:.2f}")


def draw_intervals(axis, found, title, label):
    """Draw a mean and its interval for each name, from the bottom up.

    Args:
        axis: Axis of the figure.
        found: Values by names.
        title: Title of the panel.
        label: Label of the values.
    """
    axis.axvline(0, color="0.5", linewidth=0.8)
    for place, values in enumerate(found.values()):
        mean, width = interval(values)
        axis.errorbar(mean, place, xerr=width, fmt="o", capsize=3, color="C0")
    axis.set_yticks(range(len(found)), [*found])
    axis.set(xlabel=label, title=title)


def figure(name, panels, **arguments):
    """Return axes of a figure and a function that saves it; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib here, so no plot: pip install matplotlib", file=sys.stderr)
        return None
    axes = Figure(figsize=(4.5 * panels, 3.6), layout="constrained").subplots(
        1, panels, squeeze=False, **arguments
    )[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    path = ROOT / "docs" / f"{name}.png"
    return axes, lambda: axes[0].figure.savefig(path, dpi=110)
