"""Compare TernGrad with float32, as in its paper's Figure 3.

    python examples/studies/terngrad.py
    python examples/studies/terngrad.py --quick
    python examples/studies/terngrad.py --check 16

A LeNet learns Fashion-MNIST from batches of 64, which 2, 4, 16 or 64 workers share.
Other parts use four kinds of clothes only, an easier task; or two workers without
clipping, with one scaler for all layers, with a float32 last layer, and with Adam. The
last part measures, layer by layer, the share of zero codes and the effect of clipping
on a gradient. Writes examples/results/terngrad.csv, terngrad_easy.csv and
terngrad_layers.csv, the tables of docs/studies/terngrad.md and its figure; an
interrupted run resumes. `--tables` uses the existing rows. `--quick` takes few steps of
one seed, and `--check` compares weights with virtual workers; both write nothing.
"""

import functools
import math
import sys

import keras
import numpy as np
import study
from terngrad_layers import LAYERS, MEASURED, NORMAL_SIZE, describe, normal
from terngrad_workers import Workers

import tfgradcomp

import data  # isort: skip
import models  # isort: skip

STEPS, BATCH, EVERY = 3000, 64, 250
DECAY = 5e-4
WORKERS = (2, 4, 16, 64)
# float32 on four workers differs from one worker only in the order of sums.
BY_WORKERS = (("float32", 1), ("float32", 4), *(("TernGrad", n) for n in WORKERS))
# The easier task: trousers, pullovers, bags and boots, which are rarely confused.
ALL, EASY = tuple(range(10)), (1, 2, 8, 9)
EASY_WAYS = (("float32", 1), ("TernGrad", 16), ("TernGrad", 64))
# Rates of the paper, except Adam's: 300,000 steps are too many here.
OPTIMIZERS = {
    "momentum SGD": lambda steps, decay: keras.optimizers.SGD(
        schedule(0.01, steps), momentum=0.9, weight_decay=decay
    ),
    "vanilla SGD": lambda steps, decay: keras.optimizers.SGD(
        schedule(0.1, steps), weight_decay=decay
    ),
    "Adam": lambda steps, decay: keras.optimizers.Adam(schedule(0.001, steps)),
}
WAYS = {
    "TernGrad": {},
    "not clipped": {"clip_factor": None},
    "one scaler for all layers": {"block_size": 2**20},
    "last layer float32": {"exclude": "last"},
}
FLOAT32 = ("float32", 1)
LAYER_TITLES = ("gradients of", "layer", "zero before", "zero codes")
LAYER_TITLES += ("zero, not clipped", "clipping: shorter by", "turned by")
# Numbers of workers whose gradients are measured, layer by layer.
SHARES = (2, 64)


def schedule(rate, steps):
    """Return the paper's decay of the learning rate to zero."""
    return keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0, power=0.5)


@functools.cache
def arrays(classes=ALL):
    """Return images as bytes and labels of some classes, for training and testing."""
    source = data.load()
    parts = [data.arrays(part) for part in (source.train, source.test)]
    kept = [np.isin(labels, classes) for _, labels in parts]
    return [(x[k], y[k]) for (x, y), k in zip(parts, kept, strict=True)]


def training_data(seed, steps, classes=ALL):
    """Return the images, in [0, 1], and labels of all batches, in their order."""
    images, labels = arrays(classes)[0]
    rng = np.random.default_rng([7, seed])
    epochs = math.ceil(steps * BATCH / len(labels))
    order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])
    order = order[: steps * BATCH]
    return images[order].astype(np.float32) / 255, labels[order]


def make_optimizer(key, steps, decay=DECAY):
    """Return the optimizer of a key, alone or in TernGrad."""
    way, seed = key["way"], key["seed"]
    inner = OPTIMIZERS[key["optimizer"]](steps, decay)
    if way == "float32":
        return inner
    # The paper has no minimum size: biases are ternary, too.
    return tfgradcomp.TernGrad(inner, min_size=0, seed=seed, **WAYS[way])


def train(key, steps=STEPS, before_step=None, decay=DECAY, classes=ALL):
    """Return the trained network, and its accuracy on the test images.

    Args:
        key: Optimizer, way, workers and seed.
        steps: Number of steps.
        before_step: Function of the step, its workers and its batch, or None.
        decay: Weight decay, if the optimizer has it.
        classes: Labels of the images.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(key["seed"])
    network = models.make_lenet()
    optimizer = make_optimizer(key, steps, decay)
    workers = Workers(network, optimizer, key["workers"])
    images, labels = training_data(key["seed"], steps, classes)
    for step in range(steps):
        own = slice(step * BATCH, (step + 1) * BATCH)
        if before_step:
            before_step(step, workers, images[own], labels[own])
        workers.step(images[own], labels[own])
    images, labels = arrays(classes)[1]
    logits = network.predict(images.astype(np.float32) / 255, 1000, verbose=0)
    return network, {"accuracy": float((logits.argmax(1) == labels).mean())}


def accuracy(key):
    """Return the accuracy of a training."""
    return train(key)[1]


def easy_accuracy(key):
    """Return the accuracy of a training on the easier task."""
    return train(key, classes=EASY)[1]


@functools.cache
def look(seed, steps, every, all_shares):
    """Return TernGrad's effect on layers, in a training of two workers.

    Args:
        seed: Seed of the training.
        steps: Number of steps.
        every: Number of steps between two measurements.
        all_shares: Numbers of workers to share the batch in the measurements.
    """
    found = {}

    def before_step(step, workers, images, labels):
        if step % every:
            return
        for shares in all_shares:
            parts = zip(np.split(images, shares), np.split(labels, shares), strict=True)
            vectors = [workers.gradient(*part) for part in parts]
            described = describe(vectors, workers.layout)
            for layer, block in LAYERS.items():
                found[step, shares, layer] = {
                    name: float(values[block]) for name, values in described.items()
                }

    key = {"optimizer": "momentum SGD", "way": "TernGrad", "workers": 2, "seed": seed}
    train(key, steps, before_step)
    return found


def look_at(key):
    """Return the figures of a layer in a step."""
    found = look(key["seed"], STEPS, EVERY, SHARES)
    return found[key["step"], key["shares"], key["layer"]]


def training_keys(seeds):
    """Return the keys of all trainings, seed after seed."""
    keys = []
    for seed in seeds:
        of_seed = [
            (optimizer, way, workers)
            for optimizer in ("momentum SGD", "vanilla SGD")
            for way, workers in BY_WORKERS
        ]
        of_seed += [("momentum SGD", way, 2) for way in WAYS if way != "TernGrad"]
        of_seed += [("Adam", "float32", 1), ("Adam", "TernGrad", 2)]
        for optimizer, way, workers in sorted(of_seed, key=lambda one: one[2]):
            setting = {"optimizer": optimizer, "way": way, "workers": workers}
            keys.append({**setting, "seed": seed})
    # Expensive keys come last, except one, so that an interrupted run has a result.
    first = ("momentum SGD", seeds[0])
    return sorted(
        keys,
        key=lambda key: (
            key["workers"] == 64 and (key["optimizer"], key["seed"]) != first
        ),
    )


def easy_keys(seeds):
    """Return the keys of the trainings on an easier task, the expensive keys last."""
    return [
        {"optimizer": "momentum SGD", "way": way, "workers": workers, "seed": seed}
        for way, workers in EASY_WAYS
        for seed in seeds
    ]


def layer_keys(seeds):
    """Yield the keys of the figures of layers."""
    for seed in seeds:
        for step in range(0, STEPS, EVERY):
            for shares in SHARES:
                for layer in LAYERS:
                    yield {"seed": seed, "step": step, "shares": shares, "layer": layer}


def pairs(rows, setting, plain):
    """Return the accuracies in a setting, and their differences from another's.

    Args:
        rows: Of the trainings.
        setting: Optimizer, way and workers.
        plain: Way and workers of the other setting.

    Returns:
        Percentages by seeds, and differences by common seeds.
    """
    own, base = (
        {
            row["seed"]: 100 * row["accuracy"]
            for row in rows
            if (row["optimizer"], row["way"], row["workers"]) == wanted
        }
        for wanted in (setting, (setting[0], *plain))
    )
    return list(own.values()), [own[seed] - base[seed] for seed in own if seed in base]


def accuracy_table(rows, settings, title, plain):
    """Return a table of accuracies and of differences to `plain`.

    Args:
        rows: Of the trainings.
        settings: Tuples of optimizer, way and workers.
        title: Titles of the columns of a setting that the table shows.
        plain: Way and workers of the setting to compare with.
    """
    columns = {"optimizer": 0, "gradients": 1, "workers": 2}
    lines = []
    for setting in settings:
        own, less = pairs(rows, setting, plain)
        if not own:
            continue
        cells = [str(setting[columns[name]]) for name in title]
        cells.append(f"{np.mean(own):.2f} %")
        if setting[1:] == plain:
            cells += ["", ""]
        else:
            cells += [
                study.interval_text(less, "+"),
                ", ".join(f"{one:+.2f}" for one in less),
            ]
        lines.append(cells)
    titles = (*title, "accuracy", f"less {plain[0]}, points", "by seeds")
    return study.markdown(titles, lines)


def layer_table(rows):
    """Return the table of the layers and of normal numbers."""
    lines = []
    for shares in SHARES:
        for layer in LAYERS:
            own = [r for r in rows if (r["shares"], r["layer"]) == (shares, layer)]
            mean = {name: np.mean([row[name] for row in own]) for name in MEASURED}
            images = BATCH // shares
            name = f"{images} image" + "s" * (images > 1)
            lines.append(_layer_cells(name, layer, mean))
    lines.append(_layer_cells("normal numbers", f"{NORMAL_SIZE:,}", normal()))
    return study.markdown(LAYER_TITLES, lines)


def _layer_cells(source, layer, mean):
    shares = [mean[name] for name in ("idle", "zeros", "zeros_unclipped")]
    return [
        *(source, layer),
        *(f"{100 * share:.1f} %" for share in shares),
        f"{100 * (1 - mean['length']):.1f} %",
        f"{mean['degrees']:.1f}°",
    ]


def plot(rows, layers):
    """Write docs/studies/terngrad.png."""
    made = study.figure("studies/terngrad", 3)
    if made is None:
        return
    (left, middle, right), save = made
    left.axhspan(-0.5, 0.5, color="0.93")
    left.axhline(0, color="0.5", linewidth=0.8)
    for shift, optimizer in ((0.95, "momentum SGD"), (1.05, "vanilla SGD")):
        points = [
            (shift * workers, *study.interval(less))
            for workers in WORKERS
            if (less := pairs(rows, (optimizer, "TernGrad", workers), FLOAT32)[1])
        ]
        x, mean, width = zip(*points, strict=True)
        left.errorbar(
            x, mean, np.nan_to_num(width), fmt="o", capsize=3, label=optimizer
        )
    left.set_xscale("log", base=2)
    left.set_xticks(WORKERS, WORKERS)
    left.set_xlim(1.6, 80)
    left.set(xlabel="workers", ylabel="accuracy less float32's, points")
    left.legend(frameon=False)
    for number, layer in enumerate(LAYERS):
        for shares, style in zip(SHARES, ("-", "--"), strict=True):
            own = [r for r in layers if (r["shares"], r["layer"]) == (shares, layer)]
            steps = sorted({row["step"] for row in own})
            for axis, name, factor in ((middle, "zeros", 100), (right, "degrees", 1)):
                means = [
                    factor * np.mean([r[name] for r in own if r["step"] == step])
                    for step in steps
                ]
                label = layer if style == "-" else None
                axis.plot(steps, means, style, color=f"C{number}", label=label)
    middle.axhline(100 * normal()["zeros"], color="0.5", linestyle=":")
    right.axhline(normal()["degrees"], color="0.5", linestyle=":")
    middle.set(xlabel="step", ylabel="codes that are zero, %", ylim=(None, 100))
    right.set(xlabel="step", ylabel="turned by clipping, degrees", ylim=(0, 34))
    right.legend(frameon=False, ncols=2)
    save()


def report(rows, easy, layers):
    """Write tables and figure."""
    by_workers = [
        (optimizer, way, workers)
        for optimizer in ("momentum SGD", "vanilla SGD")
        for way, workers in BY_WORKERS
    ]
    others = [("momentum SGD", way, 2) for way in WAYS]
    adam = [("Adam", *FLOAT32), ("Adam", "TernGrad", 2)]
    of_easy = [("momentum SGD", *setting) for setting in EASY_WAYS]
    title = ("optimizer", "gradients", "workers")
    tables = {
        "workers": accuracy_table(rows, by_workers, title, FLOAT32),
        "easy": accuracy_table(easy, of_easy, title[1:], FLOAT32),
        "changes": accuracy_table(rows, others, ("gradients",), ("TernGrad", 2)),
        "adam": accuracy_table(rows, adam, ("gradients",), FLOAT32),
        "layers": layer_table(layers),
    }
    where = f"{STEPS} steps, seeds {sorted({row['seed'] for row in rows})}"
    for name, table in tables.items():
        above = where if name == "workers" else None
        study.write_page("studies/terngrad.md", table, above, name)
        print(table, end="\n\n")
    plot(rows, layers)


def quick():
    """Try a few steps of some trainings, and of the layers."""
    for key in training_keys([0]):
        print(*key.values(), train(key, 10)[1]["accuracy"], flush=True)
    found = look(0, 5, 5, (2, 16))
    lines = [
        _layer_cells(f"{BATCH // shares} images", layer, figures)
        for (_, shares, layer), figures in found.items()
    ]
    print(study.markdown(LAYER_TITLES, lines))


def check(number, steps=30):
    """Train on virtual workers, too; return whether all weights have equal bits.

    Without weight decay: with it, last digits differ after some steps.
    """
    strategy = tfgradcomp.virtual_workers(number)
    tfgradcomp.enable_multi_worker_fit()
    are_equal = True
    for optimizer, way in (
        *(("momentum SGD", way) for way in WAYS),
        ("Adam", "TernGrad"),
    ):
        key = {"optimizer": optimizer, "way": way, "workers": number, "seed": 0}
        looped = train(key, steps, decay=None)[0].get_weights()
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = models.make_lenet()
            model.compile(
                make_optimizer(key, steps, None),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        model.fit(*training_data(0, steps), BATCH, verbose=0, shuffle=False)
        pairs_of_weights = zip(looped, model.get_weights(), strict=True)
        is_equal = all(np.array_equal(*pair) for pair in pairs_of_weights)
        print(optimizer, way, "equal" if is_equal else "DIFFERENT", flush=True)
        are_equal &= is_equal
    return are_equal


def main():
    """Run the study."""
    parser = study.arguments(__doc__, range(5))
    parser.add_argument("--layer-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--check", type=int, metavar="WORKERS")
    parser.add_argument("--tables", action="store_true", help="use the existing rows")
    given = parser.parse_args()
    if given.check:
        sys.exit(not check(given.check))
    if given.quick:
        quick()
        return
    measures = (None,) * 3 if given.tables else (look_at, accuracy, easy_accuracy)
    look_now, train_now, train_easy_now = measures
    keys = list(layer_keys(given.layer_seeds))
    layers = study.complete("terngrad_layers", keys, look_now, MEASURED)
    keys = training_keys(given.seeds)
    rows = study.complete("terngrad", keys, train_now, ("accuracy",))
    keys = easy_keys(given.seeds)
    easy = study.complete("terngrad_easy", keys, train_easy_now, ("accuracy",))
    report(rows, easy, layers)


if __name__ == "__main__":
    main()
