"""Measure sparse messages in longer runs, and residuals far above the threshold.

    python examples/studies/sparse.py
    python examples/studies/sparse.py --quick

Small networks learn Fashion-MNIST on two virtual workers: convolutions without and with
batch normalisation, and three dense layers. The first part trains for 4,000 steps and
records the accuracy and the ratio on the way. The second examines the cause of the
hybrid's loss at low thresholds: it varies threshold, rate, momentum and network, and
counts |r| over the threshold of each sent element. Writes
examples/results/sparse.csv and sparse_threshold.csv, the tables of
docs/studies/sparse.md and its figure; `--quick` takes few steps of some runs and writes
nothing.
"""

import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import keras
import numpy as np
import study
import tensorflow as tf
from sparse_steps import BATCH_SIZE, BINS, Steps

import tfgradcomp
from tfgradcomp import compressors, servers

import data  # isort: skip
import models  # isort: skip

WORKERS = 2
ALPHA, ZETA = 2.0, 0.999  # Of the hybrid, unless told otherwise.
LENGTHS = (400, 1000, 2000, 4000)
THRESHOLD_STEPS = 800
LAST = f"accuracy_{THRESHOLD_STEPS}"
OVER = [f"over_{2**k}" for k in range(BINS)]
BEYOND = "sent with \\|r\\| > 16 τ, %"


@dataclass(frozen=True)
class AtOnce(compressors.Compressor):
    """Selects `Hybrid`'s elements, and sends all their whole thresholds in one step.

    For the study only: the message is float32.
    """

    threshold: float
    needs_second_moments: ClassVar[bool] = True

    def fields(self, layout):
        """Declares a float32 number for each element."""
        return compressors.Identity().fields(layout)

    def init(self, layout):
        """Returns the state before the first step."""
        return {name: tf.zeros([layout.size]) for name in ("residual", "variance")}

    def compress(self, x, state, layout, context):
        """Returns the sent values and the new state."""
        r = tf.convert_to_tensor(x) + state["residual"]
        v = tf.convert_to_tensor(context.second_moments) + state["variance"]
        is_sent = (tf.abs(r) > self.threshold) & (r * r > ALPHA * v)
        whole = tf.sign(r) * tf.floor(tf.abs(r) / self.threshold) * self.threshold
        sent = tf.where(is_sent, whole, 0.0)
        v = ZETA * tf.maximum(v - 2 * r * sent + sent * sent, 0)
        return compressors.Compressed(
            {"values": sent}, {"residual": r - sent, "variance": v}
        )

    def decompress(self, payload, layout):
        """Returns the sent values."""
        return payload["values"]


def at_once(inner, threshold, **arguments):
    """Return a wrapper with `AtOnce`."""
    compressor = AtOnce(threshold)
    return tfgradcomp.CompressedOptimizer(
        inner, compressor, servers.Mean(compressor), min_size=0, **arguments
    )


METHODS = {
    "none": (None, {}),
    "variance-1.5": (tfgradcomp.VarianceBased, {"alpha": 1.5}),
    "variance-2": (tfgradcomp.VarianceBased, {"alpha": 2.0}),
    **{
        f"{name.lower()}-{threshold}": (
            getattr(tfgradcomp, name),
            {"threshold": threshold},
        )
        for name in ("Strom", "Hybrid")
        for threshold in (0.01, 0.03, 0.05, "auto")
    },
    **{f"at once-{t}": (at_once, {"threshold": t}) for t in (0.01, 0.03, 0.05)},
}
# The networks and the optimizers of the first part, of the number of steps.
LENGTH_NETWORKS = ("batch norm", "plain")
INNERS = {
    "momentum SGD": lambda steps: keras.optimizers.SGD(0.02, momentum=0.9),
    "Adam": lambda steps: keras.optimizers.Adam(),
}
FEW = ("none", "variance-2", "strom-0.01", "hybrid-0.01", "hybrid-auto", "at once-0.01")
# Network, learning rate and momentum of the second part, and its methods. In the first
# setting the hybrid collapses; in the second a gradient moves the weights as far, but
# in one step; with dense layers Strom falls far behind, too.
COLLAPSE = ("batch norm", 0.1, 0.9)
SETTINGS = {
    COLLAPSE: [name for name in METHODS if name != "variance-1.5"],
    ("batch norm", 1.0, 0.0): FEW,
    ("plain", 0.03, 0.9): FEW,
    ("batch norm", 0.03, 0.9): FEW,
    # The paper's rate: 0.05 for each of eight workers.
    ("batch norm", 0.4, 0.9): (*FEW, "strom-auto"),
    ("dense", 0.05, 0.9): (*FEW, "strom-auto"),
    ("dense", 0.01, 0.9): (*FEW, "strom-auto"),
}


def make_convolutions(has_batch_norm):
    """Return two convolutions and two dense layers, for images of half the size."""
    layers = keras.layers

    def activated(x):
        if has_batch_norm:
            x = layers.BatchNormalization(momentum=0.9)(x)
        return layers.ReLU()(x)

    images = keras.Input((28, 28, 1))
    x = layers.Rescaling(1 / models.DEVIATION, -models.MEAN / models.DEVIATION)(images)
    x = layers.AveragePooling2D(2)(x)
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, strides=2, use_bias=not has_batch_norm)(x)
        x = activated(x)
    x = layers.Dense(64, use_bias=not has_batch_norm)(layers.Flatten()(x))
    return keras.Model(images, layers.Dense(10)(activated(x)))


def make_dense():
    """Return three dense layers."""
    layers = keras.layers
    hidden = [layers.Dense(units, activation="relu") for units in (64, 32)]
    return keras.Sequential(
        [keras.Input((28, 28, 1)), layers.Flatten(), *hidden, layers.Dense(10)]
    )


NETWORKS = {
    "batch norm": functools.partial(make_convolutions, has_batch_norm=True),
    "plain": functools.partial(make_convolutions, has_batch_norm=False),
    "dense": make_dense,
}


def run(strategy, pairs, key, lengths, inner):
    """Return accuracies and ratios on the way, and counts of |r| over the threshold.

    Args:
        strategy: The workers.
        pairs: Images and labels for training, and for testing.
        key: Network, method and seed.
        lengths: Numbers of steps; the last is the total.
        inner: Function of the number of steps that returns a Keras optimizer.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(key["seed"])
    wrapper, arguments = METHODS[key["method"]]
    with strategy.scope():
        model = NETWORKS[key["network"]]()
        optimizer = inner(lengths[-1])
        if wrapper:
            optimizer = wrapper(
                optimizer, transport="all_gather", nonfinite="skip", **arguments
            )
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    images, labels = pairs[0]
    rng = np.random.default_rng(key["seed"])
    passes = -(-lengths[-1] * WORKERS * BATCH_SIZE // len(labels))
    order = np.concatenate([rng.permutation(len(labels)) for _ in range(passes)])
    steps = Steps(strategy, model, images, labels, order, "threshold" in arguments)
    counts, found = np.zeros(BINS, np.int64), {}
    for number in lengths:
        counts += steps.take(number)
        _, accuracy = model.evaluate(*pairs[1], batch_size=1000, verbose=0)
        ratio = optimizer.traffic.ratio if wrapper else 1.0
        if counts.any():
            elements = sum(math.prod(v.shape) for v in model.trainable_variables)
            ratio = elements * WORKERS * number / counts.sum()
        found |= {f"accuracy_{number}": accuracy, f"ratio_{number}": ratio}
    exceeding = counts[::-1].cumsum()[::-1]
    shares = exceeding / counts.sum() if counts.any() else [math.nan] * BINS
    return found | dict(zip(OVER, map(float, shares), strict=True))


def falling(rate, momentum):
    """Return a function of the number of steps that returns SGD, its rate falling."""
    return lambda steps: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(rate, steps), momentum=momentum
    )


def length_keys(seeds):
    """Return the keys of the first part, those of a seed together."""
    chosen = ("none", "variance-1.5", "strom-0.01", "hybrid-0.01", "hybrid-auto")
    return [
        {"network": network, "inner": inner, "method": method, "seed": seed}
        for seed in seeds
        for inner, network in itertools.product(INNERS, LENGTH_NETWORKS)
        for method in chosen
    ]


def threshold_keys(seeds):
    """Return the keys of the second part, those of a seed together."""
    names = ("network", "rate", "momentum")
    return [
        {**dict(zip(names, setting, strict=True)), "method": method, "seed": seed}
        for seed in seeds
        for setting, methods in SETTINGS.items()
        for method in methods
    ]


class Table:
    """Rows of several seeds, with their means and intervals.

    Args:
        rows: The rows.
        names: Columns that tell rows apart, besides the seed; the last is the method.
    """

    def __init__(self, rows, names):
        self.groups = {}
        for row in rows:
            key = tuple(row[name] for name in names)
            self.groups.setdefault(key, {})[row["seed"]] = row

    def mean(self, key, column):
        """Return the mean of a column over the seeds."""
        return statistics.mean(row[column] for row in self.groups[key].values())

    def less(self, key, column):
        """Return the loss against no compression, in points, by the seeds."""
        plain = self.groups.get((*key[:-1], "none"), {})
        own = self.groups[key]
        seeds = [seed for seed in own if seed in plain]
        points = [100 * (own[s][column] - plain[s][column]) for s in seeds]
        return points or [math.nan]

    def text(self, key, column):
        """Return the text of the accuracy, or of the loss."""
        if key[-1] == "none":
            return f"{100 * self.mean(key, column):.2f} %"
        return study.interval_text(self.less(key, column), "+")

    def over(self, key, bound):
        """Return the text of the share of sent elements with |r| above a bound."""
        share = 100 * self.mean(key, f"over_{bound}")
        return "" if math.isnan(share) else f"{share:.1f}"

    def lines(self, titles, cells):
        """Return a table of the cells that a function of a key returns."""
        return study.markdown(titles, [map(str, cells(key)) for key in self.groups])


def length_table(table, lengths=LENGTHS):
    """Return the table of the first part."""

    def cells(key):
        yield from key
        for number in lengths:
            text = table.text(key, f"accuracy_{number}")
            if key[-1] != "none":
                text += f"; {table.mean(key, f'ratio_{number}'):.0f}"
            yield text
        yield table.over(key, 16)

    numbers = [f"{number:,} steps" for number in lengths]
    return table.lines(["network", "optimizer", "method", *numbers, BEYOND], cells)


def threshold_table(table):
    """Return the table of the second part."""

    def cells(key):
        yield from key
        yield table.text(key, LAST)
        ratio = table.mean(key, f"ratio_{THRESHOLD_STEPS}")
        yield "" if key[-1] == "none" else f"{ratio:.0f}"
        yield table.over(key, 16)
        yield table.over(key, 256)

    titles = ["network", "rate", "momentum", "method", "accuracy, or less none"]
    return table.lines([*titles, "ratio", BEYOND, BEYOND.replace("16", "256")], cells)


def draw(lengths, thresholds):
    """Draw ratios over steps, |r| over the threshold, and losses over that."""
    drawn = study.figure("studies/sparse", 3)
    if drawn is None:
        return
    (left, middle, right), save = drawn
    for key in lengths.groups:
        if key[:2] == ("batch norm", "momentum SGD") and key[-1] != "none":
            ratios = [lengths.mean(key, f"ratio_{number}") for number in LENGTHS]
            left.plot(LENGTHS, ratios, "o-", label=key[-1])
    left.set(xscale="log", yscale="log", xlabel="steps", ylabel="ratio so far")
    left.set_xticks(LENGTHS, [f"{number:,}" for number in LENGTHS])
    left.set_ylim(top=2e4)
    left.minorticks_off()
    left.set_title("batch norm, momentum SGD")
    chosen = [key for key in thresholds.groups if key[-1].startswith(("s", "h"))]
    for key in chosen:
        if key[:-1] == COLLAPSE:
            shares = [100 * thresholds.mean(key, name) for name in OVER]
            style = "-" if key[-1].startswith("hybrid") else "--"
            middle.plot([2**k for k in range(BINS)], shares, style, label=key[-1])
    middle.set(
        xscale="log",
        xlim=(1, 2000),
        xlabel="|r| / τ",
        ylabel="% of what is sent beyond it",
    )
    middle.set_title("{}, rate {}, momentum {}".format(*COLLAPSE))
    for setting in SETTINGS:
        keys = [key for key in chosen if key[:-1] == setting]
        if not keys:
            continue
        shares = [100 * thresholds.mean(key, "over_16") for key in keys]
        losses = [statistics.mean(thresholds.less(key, LAST)) for key in keys]
        label = "{}, rate {}, momentum {}".format(*setting)
        right.plot(shares, losses, "o", label=label)
    right.set(xlabel="% of what is sent beyond 16 τ", ylabel="points less than none")
    right.set_yscale("symlog", linthresh=10)
    right.set_yticks([0, -5, -10, -50], ["0", "-5", "-10", "-50"])
    right.set_title("Strom and hybrid")
    for one in (left, middle):
        one.legend(fontsize="x-small")
    right.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    save()


def main():
    """Run the study."""
    given = study.arguments(__doc__, range(5)).parse_args()
    strategy = tfgradcomp.virtual_workers(WORKERS)
    tfgradcomp.enable_multi_worker_fit()
    source = data.load()
    images, labels = data.arrays(source.test)
    test = tf.cast(images, tf.float32) / 255, labels
    pairs = tuple(map(tf.constant, data.arrays(source.train))), test

    def of_length(key, lengths=LENGTHS):
        return run(strategy, pairs, key, lengths, INNERS[key["inner"]])

    def of_threshold(key, lengths=(THRESHOLD_STEPS,)):
        inner = falling(key["rate"], key["momentum"])
        return run(strategy, pairs, key, lengths, inner)

    if given.quick:
        few = (20, 40)
        keys = [key for key in length_keys([0])[-5:] if key["method"] in FEW[::4]]
        rows = [key | of_length(key, few) for key in keys]
        print(length_table(Table(rows, ("network", "inner", "method")), few))
        print(*(key := threshold_keys([0])[5]).values(), of_threshold(key, (40,)))
        return

    def complete(name, keys, measure, lengths):
        columns = [f"{what}_{n}" for n in lengths for what in ("accuracy", "ratio")]
        return study.complete(name, keys, measure, [*columns, *OVER])

    name, how = "sparse_threshold", (of_threshold, (THRESHOLD_STEPS,))
    # The first seeds of all settings come before other seeds.
    for number in range(1, len(given.seeds) + 1):
        seeds = given.seeds[:number]
        of_thresholds = complete(name, threshold_keys(seeds), *how)
        of_lengths = complete("sparse", length_keys(seeds), of_length, LENGTHS)
    lengths = Table(of_lengths, ("network", "inner", "method"))
    thresholds = Table(of_thresholds, ("network", "rate", "momentum", "method"))
    draw(lengths, thresholds)
    where = f"{WORKERS} virtual workers, batches of {BATCH_SIZE} each"
    page = "studies/sparse.md"
    study.write_page(page, length_table(lengths), where, "length")
    study.write_page(page, threshold_table(thresholds), where, "threshold")


if __name__ == "__main__":
    main()
