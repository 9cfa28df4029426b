"""Accuracy of 1-bit and 0/1 Adam next to Adam, over several seeds, on four workers.

    python examples/studies/onebit_adam.py
    python examples/studies/onebit_adam.py --quick

A LeNet learns Fashion-MNIST, and a small transformer the next character of a synthetic
text. The workers are virtual: one process has the bits of four. Writes
examples/results/onebit_adam.csv and the table of docs/onebit-adam.md; `--quick` takes
few steps of one seed and writes nothing.
"""

import argparse
import csv
import statistics
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import data  # noqa: E402
import models  # noqa: E402
from compare_methods import conditions, replace_table  # noqa: E402

RESULTS = ROOT / "examples" / "results" / "onebit_adam.csv"
PAGE = ROOT / "docs" / "onebit-adam.md"
COLUMNS = ("task", "optimizer", "seed", "steps", "accuracy")
WORKERS = 4
LETTERS, LENGTH = 16, 32
# Adam by its name, and what is around it, of the number of all steps.
OPTIMIZERS = {
    "Adam": lambda adam, steps: adam,
    "OneBitAdam": lambda adam, steps: tfgradcomp.OneBitAdam(adam, steps // 5),
    "OneBitAdam, refresh=16": lambda adam, steps: tfgradcomp.OneBitAdam(
        adam, steps // 5, refresh=16
    ),
    # Rounds of 1, 2, 4 and 8 steps, each for an eighth of the training, then of 16.
    "ZeroOneAdam": lambda adam, steps: tfgradcomp.ZeroOneAdam(
        adam, steps // 5, double_every=steps // 8
    ),
}


def make_transformer():
    """Return a decoder of one block, for texts of `LENGTH` letters."""
    layers = keras.layers
    text = keras.Input((LENGTH,), dtype="int32")
    places = layers.Embedding(LENGTH, 64)(keras.ops.arange(LENGTH))
    x = layers.Embedding(LETTERS, 64)(text) + places
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(64)(layers.Dense(256, "gelu")(y))
    return keras.Model(text, layers.Dense(LETTERS)(layers.LayerNormalization()(x)))


def texts(number, seed):
    """Return texts in which a letter depends on the two before it, and on chance."""
    likely = np.random.default_rng(0).dirichlet([0.1] * LETTERS, [LETTERS, LETTERS])
    rng = np.random.default_rng([1, seed])
    found = rng.integers(LETTERS, size=[number, LENGTH + 1])
    for place in range(2, LENGTH + 1):
        chances = likely[found[:, place - 2], found[:, place - 1]].cumsum(-1)
        found[:, place] = (rng.random([number, 1]) > chances[:, :-1]).sum(-1)
    return found.astype(np.int32)


def text_batches(number, batch_size, seed):
    """Return batches of texts and of the letters that follow."""
    found = texts(number, seed)
    batches = tf.data.Dataset.from_tensor_slices((found[:, :-1], found[:, 1:]))
    return batches.batch(batch_size, drop_remainder=True)


def task_of(name, seed):
    """Return what makes the model, its rate, the epochs that it needs, and datasets."""
    if name == "LeNet":
        source = data.load()
        train = data.batches(source.train, 64 * WORKERS, seed)
        return models.make_lenet, 1e-3, 3, train, data.batches(source.test, 1000)
    train = text_batches(20_000, 32 * WORKERS, 1 + seed)
    return make_transformer, 3e-3, 10, train, text_batches(2_000, 500, 0)


def run(strategy, task, optimizer, seed, is_quick):
    """Return the row of a training."""
    keras.utils.set_random_seed(seed)
    make_model, rate, epochs, train, test = task_of(task, seed)
    if is_quick:
        epochs, train = 1, train.take(60)
    steps = epochs * len(train)
    with strategy.scope():
        model = make_model()
        adam = keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(rate, steps)
        )
        model.compile(
            OPTIMIZERS[optimizer](adam, steps),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(train, epochs=epochs, verbose=0, shuffle=False)
    _, accuracy = model.evaluate(test, verbose=0)
    print(task, optimizer, seed, f"{accuracy:.4f}", flush=True)
    keras.backend.clear_session()
    row = {"task": task, "optimizer": optimizer, "seed": seed, "steps": steps}
    return {**row, "accuracy": accuracy}


def table(rows):
    """Return the table, a row for each task and optimizer."""
    titles = ["task", "optimizer", "steps", "accuracy, mean", "less Adam, by seeds"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        plain = {r["seed"]: r["accuracy"] for r in of_task if r["optimizer"] == "Adam"}
        for optimizer in OPTIMIZERS:
            own = [row for row in of_task if row["optimizer"] == optimizer]
            mean = statistics.mean(row["accuracy"] for row in own)
            less = [f"{100 * (r['accuracy'] - plain[r['seed']]):+.2f}" for r in own]
            cells = [task, optimizer, str(own[0]["steps"]), f"{100 * mean:.2f} %"]
            cells.append("" if optimizer == "Adam" else ", ".join(less))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    strategy = tfgradcomp.virtual_workers(WORKERS)
    tfgradcomp.enable_multi_worker_fit()
    rows = [
        run(strategy, task, optimizer, seed, given.quick)
        for task in ("LeNet", "transformer")
        for seed in ([0] if given.quick else given.seeds)
        for optimizer in OPTIMIZERS
    ]
    if given.quick:
        print(table(rows))
        return
    text = table(rows)
    print(text)
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    note = conditions(f"{WORKERS} virtual workers", "2")
    PAGE.write_text(replace_table(PAGE.read_text(), f"{note}\n\n{text}", "accuracy"))


if __name__ == "__main__":
    main()
