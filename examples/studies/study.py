"""What the studies share: training on virtual workers, rows and tables."""

import csv
import statistics
import sys
from pathlib import Path

import keras

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from compare_methods import conditions, replace_table  # noqa: E402


def train(strategy, seed, make_model, make_optimizer, datasets, epochs):
    """Return the accuracy on the second dataset after training on the first.

    The same seed gives every optimizer the same weights to begin with, and batches.
    """
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = make_model()
        model.compile(
            make_optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    batches, test = datasets
    model.fit(batches, epochs=epochs, verbose=0, shuffle=False)
    _, accuracy = model.evaluate(test, verbose=0)
    keras.backend.clear_session()
    return accuracy


def table(rows, group, plain, others=()):
    """Return a table of mean accuracies, and of what each seed lacks of another way.

    Args:
        rows: Dicts with "way", "seed", "accuracy" and the columns named here.
        group: Column; ways are compared where it is equal.
        plain: The way that the others are compared with.
        others: Further columns to show, the same for all seeds.
    """
    titles = [group, "way", *others, "accuracy, mean", f"less {plain}, by seeds"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in dict.fromkeys(row[group] for row in rows):
        of_group = [row for row in rows if row[group] == name]
        base = {r["seed"]: r["accuracy"] for r in of_group if r["way"] == plain}
        for way in dict.fromkeys(row["way"] for row in of_group):
            own = [row for row in of_group if row["way"] == way]
            mean = statistics.mean(row["accuracy"] for row in own)
            less = [f"{100 * (r['accuracy'] - base[r['seed']]):+.2f}" for r in own]
            cells = [name, way, *(str(own[0][column]) for column in others)]
            cells += [f"{100 * mean:.2f} %", "" if way == plain else ", ".join(less)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(name, rows, text, page, where):
    """Write rows to examples/results, and a table with its conditions into a page."""
    with open(ROOT / "examples" / "results" / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    page = ROOT / "docs" / page
    note = f"{conditions(where, '2')}."
    page.write_text(replace_table(page.read_text(), f"{note}\n\n{text}", "accuracy"))
